"""A shuffle without a random read: each index has a random-looking place, and each place gives its index back.

`numpy`'s permutation of 40 million indices and the look-ups through it take six seconds, nearly all of them spent
waiting for memory. A bijection of 32-bit numbers takes a fifth of a second, because it goes through memory in order.
"""

import numpy as np
from numpy.typing import NDArray

_BLOCK = 1 << 16
"""Numbers worked on at a time: they stay in the processor's cache."""
# Odd numbers have an inverse modulo 2^32; these two make each bit of the result hang on each bit of the number.
_FACTORS = (0x7FEB352D, 0x846CA68B)
_INVERSES = tuple(pow(factor, -1, 1 << 32) for factor in _FACTORS)


class Shuffle:
    """A bijection of the 32-bit numbers, another one for each state of the generator it is made with."""

    def __init__(self, random: np.random.Generator) -> None:
        # Two rounds, so that numbers that differ alike do not move alike.
        self._keys = random.integers(0, 1 << 32, size=2, dtype=np.uint32)

    def places(self, count: int) -> NDArray[np.uint32]:
        """The places [count] of the indices 0 to count - 1: distinct, and anywhere among the 32-bit numbers."""
        numbers = np.arange(count, dtype=np.uint32)
        for start in range(0, count, _BLOCK):
            block = numbers[start : start + _BLOCK]
            for key in self._keys:
                block ^= key
                block ^= block >> 16
                block *= np.uint32(_FACTORS[0])
                block ^= block >> 15
                block *= np.uint32(_FACTORS[1])
                block ^= block >> 16
        return numbers

    def indices(self, places: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """The indices that have these places, in the same memory."""
        for start in range(0, len(places), _BLOCK):
            block = places[start : start + _BLOCK]
            for key in self._keys[::-1]:
                block ^= block >> 16
                block *= np.uint32(_INVERSES[1])
                block ^= (block >> 15) ^ (block >> 30)
                block *= np.uint32(_INVERSES[0])
                block ^= block >> 16
                block ^= key
        return places
