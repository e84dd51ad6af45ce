"""Which pairs an epoch has when the recipe gives its text sources weights."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def epoch_pairs(num_pairs: Sequence[int], weights: Sequence[float], seed: int, epoch: int) -> NDArray[np.uint32] | None:
    """Return the pairs of an epoch as indices, in the order of the corpus; None if each occurs once.

    An epoch has floor(weight) copies of a source and, for the rest of the weight, a random sample of its pairs. Where
    the size of the sample would not be whole, it is rounded up or down at random, so that it is right on average.

    Args:
        num_pairs: number of pairs of each source, in the order of the corpus.
        weights: weight of each source, above 0.
        seed: together with `epoch` determines the sample.
        epoch: index of the epoch.
    """
    if all(weight == 1 for weight in weights):
        return None
    parts, first = [], 0
    for source, (size, weight) in enumerate(zip(num_pairs, weights, strict=True)):
        copies = int(weight)
        random = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch, source])))
        # Weights are decimal fractions: 0.3 of 10 pairs are 3, and not a little less.
        exact = round((weight - copies) * size, 6)
        sample_size = int(exact)
        if exact > sample_size:
            sample_size += int(random.random() < exact - sample_size)
        sample = random.choice(size, sample_size, replace=False)
        times = np.full(size, copies, dtype=np.int64)
        times[sample] += 1
        parts.append(np.repeat(np.arange(first, first + size, dtype=np.uint32), times))
        first += size
    return np.concatenate(parts)


def fewest_pairs(num_pairs: Sequence[int], weights: Sequence[float]) -> int:
    """Return a number of pairs that no epoch falls short of."""
    return sum(int(round(size * weight, 6)) for size, weight in zip(num_pairs, weights, strict=True))
