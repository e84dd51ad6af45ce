"""Groups of pairs of similar length, which are padded to rectangles: for validation and for other programs."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class LengthBucket(NamedTuple):
    """Pairs of similar length."""

    pairs: NDArray[np.integer]
    """[n] indices into the corpus."""
    source_length: int
    target_length: int
    """Both lengths are the longest in the bucket, including EOS."""


def length_buckets(
    source_lengths: NDArray[np.integer],
    target_lengths: NDArray[np.integer],
    max_tokens: int,
    random: np.random.Generator | None = None,
) -> list[LengthBucket]:
    """Divide all pairs into buckets of at most `max_tokens` padded tokens per side, longest source first.

    Args:
        source_lengths: [pairs], including EOS.
        target_lengths: [pairs], including EOS.
        max_tokens: number of pairs times the longest length, unless a single pair is longer.
        random: decides between pairs of equal lengths; None for the order of the corpus.
    """
    ties = np.arange(len(source_lengths)) if random is None else random.permutation(len(source_lengths))
    order = np.lexsort((ties, -target_lengths.astype(np.int64), -source_lengths.astype(np.int64)))
    source, target = source_lengths[order].astype(np.int64), target_lengths[order].astype(np.int64)
    buckets, first = [], 0
    while first < len(order):
        window = slice(first, first + max(1, max_tokens // int(source[first])))
        longest = np.maximum(source[first], np.maximum.accumulate(target[window]))
        fitting = np.arange(1, len(longest) + 1) * longest <= max_tokens
        # Sources more than a tenth shorter than the first would cost more in padding than a smaller bucket does.
        fitting &= source[window] * 11 + 10 >= source[first] * 10
        end = first + max(1, int(np.count_nonzero(np.logical_and.accumulate(fitting))))
        buckets.append(LengthBucket(order[first:end], int(source[first]), int(target[first:end].max())))
        first = end
    return buckets
