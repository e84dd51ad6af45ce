"""Which pairs an epoch has when the recipe gives its text sources weights."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def epoch_pairs(num_pairs: Sequence[int], weights: Sequence[float], seed: int, epoch: int) -> NDArray[np.uint32] | None:
    """Return the pairs of an epoch as indices, in the order of the corpus; None if each occurs once.

    An epoch has floor(weight) copies of a source and, for the rest of the weight, a random sample of its pairs.

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
        sample = random.choice(size, round((weight - copies) * size), replace=False)
        times = np.full(size, copies, dtype=np.int64)
        times[sample] += 1
        parts.append(np.repeat(np.arange(first, first + size, dtype=np.uint32), times))
        first += size
    return np.concatenate(parts)
