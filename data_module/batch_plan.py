"""Plan which pairs form each optimizer step.

A *global batch*, which is one optimizer step, is a random set of pairs. It depends only on (lengths, settings, seed,
epoch), not on the number of ranks, so each process that makes batches computes the plan itself. Lengths include EOS.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_module.corpus.store import ParallelCorpus, lengths_with_eos

_WINDOW_BATCHES = 64
"""The number of batches, about, that are cut at a time, so that memory does not grow with the corpus."""


class EpochPlan:
    """The global batches of one epoch: `len(plan)` of them; `plan[i]` are the indices of its pairs."""

    def __init__(self, order: NDArray[np.uint32], starts: Sequence[int], target_tokens: Sequence[int]) -> None:
        """Create a plan from the pairs in order, where each batch begins, then the end, and each one's target tokens.

        A pair takes 4 bytes for as long as the plan is kept.
        """
        self._order, self._starts, self._target_tokens = order, starts, target_tokens

    def __len__(self) -> int:
        return len(self._target_tokens)

    def __getitem__(self, index: int) -> NDArray[np.uint32]:
        """Return the indices [pairs] of a global batch's pairs in the corpus."""
        return self._order[self._starts[index] : self._starts[index + 1]]

    def target_tokens(self, index: int) -> int:
        """Return the number of target tokens of a global batch, including EOS."""
        return self._target_tokens[index]


def plan_epoch(
    source_lengths: NDArray[np.integer],
    target_lengths: NDArray[np.integer],
    *,
    batch_tokens: int,
    seed: int,
    epoch: int,
    pairs: NDArray[np.integer] | None = None,
) -> EpochPlan:
    """Arrange all pairs of an epoch in global batches of random pairs.

    Each batch takes pairs in a random order until the next one would exceed `batch_tokens` on either side.

    Args:
        source_lengths: [pairs], including EOS.
        target_lengths: [pairs], including EOS.
        batch_tokens: maximum number of tokens per side of a global batch.
        seed: together with `epoch` determines the random order.
        epoch: index of the epoch.
        pairs: the pairs that the epoch has, as indices, which may repeat; None if it has each of them once.

    Raises ValueError if there are no pairs, or a pair is longer than a batch.

    Example, eight pairs and batches of at most 20 tokens a side:

    >>> source_lengths, target_lengths = np.array([3, 9, 4, 6, 2, 8, 5, 7]), np.array([4, 8, 4, 7, 3, 9, 4, 6])
    >>> plan = plan_epoch(source_lengths, target_lengths, batch_tokens=20, seed=1, epoch=0)
    >>> [plan[batch].tolist() for batch in range(len(plan))]
    [[5, 0], [1, 4, 2, 6], [3, 7]]
    >>> [plan.target_tokens(batch) for batch in range(len(plan))]
    [13, 19, 13]
    """
    if len(source_lengths if pairs is None else pairs) == 0:
        raise ValueError("there are no pairs to plan")
    longest = int(max(source_lengths.max(), target_lengths.max()))
    if longest > batch_tokens:
        raise ValueError(f"a pair of {longest} tokens does not fit in a batch of {batch_tokens}")
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch])))
    order = np.arange(len(source_lengths), dtype=np.uint32) if pairs is None else pairs.astype(np.uint32)
    random.shuffle(order)
    return EpochPlan(order, *_cut(order, source_lengths, target_lengths, batch_tokens))


def _cut(
    order: NDArray[np.uint32],
    source_lengths: NDArray[np.integer],
    target_lengths: NDArray[np.integer],
    batch_tokens: int,
) -> tuple[list[int], list[int]]:
    """Cut a random order of pairs into batches; return where each begins, then the end, and its target tokens."""
    # A batch ends before the first pair with which its tokens exceed `batch_tokens` on either side. A binary search in
    # running sums finds it, for a window of pairs at a time. A batch that the window cuts off is cut again at the
    # beginning of the next window. A window of more pairs than a batch has tokens holds at least one whole batch.
    mean = max(1.0, float(max(source_lengths.mean(), target_lengths.mean())))
    window = max(int(_WINDOW_BATCHES * batch_tokens / mean), batch_tokens) + 1
    starts, target_tokens = [0], []
    while starts[-1] < len(order):
        first = starts[-1]
        window_pairs = order[first : first + window]  # `begin` and `end` count from `first`.
        source, target = (np.cumsum(side[window_pairs], dtype=np.int64) for side in (source_lengths, target_lengths))
        begin = source_before = target_before = 0
        while begin < len(window_pairs):
            end = int(
                min(
                    np.searchsorted(source, source_before + batch_tokens, side="right"),
                    np.searchsorted(target, target_before + batch_tokens, side="right"),
                )
            )
            if end == len(window_pairs) and first + end < len(order):
                break  # More pairs may fit; they are beyond the window.
            starts.append(first + end)
            target_tokens.append(int(target[end - 1]) - target_before)
            begin, source_before, target_before = end, int(source[end - 1]), int(target[end - 1])
    return starts, target_tokens


def epoch_pairs(num_pairs: Sequence[int], weights: Sequence[float], seed: int, epoch: int) -> NDArray[np.uint32] | None:
    """Return the pairs of an epoch as indices, in the order of the corpus; None if each occurs once.

    An epoch has floor(weight) copies of a source and, for the rest of the weight, a random sample of its pairs. If the
    size of the sample is not a whole number, it is rounded up or down at random, so that its mean is right. Seed and
    epoch determine the sample.
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
    """Return a lower bound on the number of pairs of an epoch."""
    return sum(int(round(size * weight, 6)) for size, weight in zip(num_pairs, weights, strict=True))


class Epoch(NamedTuple):
    """What is trained on in one epoch."""

    corpus: ParallelCorpus
    plan: EpochPlan
    """Global batches of pairs of `corpus`."""


class Epochs:
    """Returns the epochs of a corpus."""

    def __init__(
        self,
        variants: Sequence[ParallelCorpus],
        *,
        batch_tokens: int,
        seed: int,
        weights: tuple[Sequence[int], Sequence[float]] = ((), ()),
    ) -> None:
        """Store the arguments. A plan is made when its epoch is asked for.

        `variants` are the training pairs, in the encodings that epochs take in turn; `weights` are the number of pairs
        and the weight of each training source, empty if all have the weight 1. See `plan_epoch` for the others.
        """
        self._variants = variants
        self._settings = {"batch_tokens": batch_tokens, "seed": seed}
        self._weights = weights

    def get(self, epoch: int) -> Epoch:
        """Return an epoch; raise ValueError as `plan_epoch` does."""
        corpus = self._variants[epoch % len(self._variants)]
        pairs = epoch_pairs(*self._weights, self._settings["seed"], epoch)
        source, target = lengths_with_eos(corpus.source), lengths_with_eos(corpus.target)
        return Epoch(corpus, plan_epoch(source, target, **self._settings, epoch=epoch, pairs=pairs))
