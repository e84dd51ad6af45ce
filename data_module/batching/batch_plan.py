"""Plan which pairs form each optimizer step.

A *global batch*, which is one optimizer step, is a random set of pairs. It depends only on (lengths, settings, seed,
epoch), not on the number of ranks. Lengths include EOS.
"""

import numpy as np
from numpy.typing import NDArray

_WINDOW_BATCHES = 256
"""About how many batches' lengths are summed at a time, so that memory does not grow with the corpus."""


class EpochPlan:
    """The global batches of one epoch: `len(plan)` of them; `plan[i]` are the indices of its pairs.

    The plan is a view of one flat array, which may be in memory or in a file that processes share.
    """

    def __init__(self, numbers: NDArray[np.uint32]) -> None:
        """Create a view of `numbers`, which another plan's attribute `numbers` has returned."""
        self.numbers = numbers
        num_batches = int(numbers[0])
        parts = np.split(numbers, np.cumsum([1, num_batches + 1, num_batches]))[1:]
        self._starts, self._target_tokens, self._order = parts

    def __len__(self) -> int:
        return len(self._target_tokens)

    def __getitem__(self, index: int) -> NDArray[np.uint32]:
        return self._order[int(self._starts[index]) : int(self._starts[index + 1])]

    def target_tokens(self, index: int) -> int:
        """Return the number of target tokens of a global batch, including EOS."""
        return int(self._target_tokens[index])


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

    Raises:
        ValueError: there are no pairs, or a pair is longer than a batch.
    """
    if len(source_lengths if pairs is None else pairs) == 0:
        raise ValueError("there are no pairs to plan")
    longest = int(max(source_lengths.max(), target_lengths.max()))
    if longest > batch_tokens:
        raise ValueError(
            f"batches.batch_tokens {batch_tokens} must be at least {longest}, the tokens of the longest sentence; "
            "raise it, or lower corpus.max_tokens"
        )
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch])))
    order = np.arange(len(source_lengths), dtype=np.uint32) if pairs is None else pairs.astype(np.uint32)
    random.shuffle(order)
    mean = max(1.0, float(max(source_lengths.mean(), target_lengths.mean())))
    window = int(_WINDOW_BATCHES * batch_tokens / mean) + 1
    starts, target_tokens = [0], []
    while starts[-1] < len(order):
        first = starts[-1]
        ahead = order[first : first + window]
        source, target = (np.cumsum(side[ahead], dtype=np.int64) for side in (source_lengths, target_lengths))
        begin = source_before = target_before = 0
        while begin < len(ahead):
            end = int(
                min(
                    np.searchsorted(source, source_before + batch_tokens, side="right"),
                    np.searchsorted(target, target_before + batch_tokens, side="right"),
                )
            )
            if end == len(ahead) and first + end < len(order):
                break  # The batch goes on beyond the window.
            starts.append(first + end)
            target_tokens.append(int(target[end - 1]) - target_before)
            begin, source_before, target_before = end, int(source[end - 1]), int(target[end - 1])
    parts = ([len(target_tokens)], starts, target_tokens)
    return EpochPlan(np.concatenate([*(np.asarray(part, dtype=np.uint32) for part in parts), order]))
