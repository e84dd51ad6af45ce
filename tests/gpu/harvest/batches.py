"""Synthetic batches of the paper's size."""

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from data_module.batching.batch import RankBatch, SpecialIds, collate
from data_module.batching.rank_rows import rank_rows, row_shape

SPECIAL = SpecialIds(pad=0, bos=2, eos=3)
STEP_TOKENS, MEAN_LENGTH, LONGEST = 25_000, 27, 120
NUM_STEPS = 4


class Shares:
    """An endless loader of a few different steps, whose pairs have the same lengths."""

    def __init__(
        self,
        pieces: int,
        micro_batches: int = 1,
        in_blocks: bool = False,
        tokens: int = STEP_TOKENS,
        mean_length: int = MEAN_LENGTH,
    ) -> None:
        """Make the steps; `in_blocks` is needed on a CPU."""
        self.lengths = _lengths(tokens, mean_length)
        """Source and target lengths of a step's pairs, including the end symbol."""
        longest = int(max(side.max() for side in self.lengths))
        # A row has 5 % more than an even share, and the next multiple of 128.
        limit = int(max(1.1 * tokens / micro_batches, longest)) + 160
        self.shape = row_shape(
            (self.lengths[0].mean(), self.lengths[1].mean()),
            longest,
            batch_tokens=tokens,
            max_tokens_per_device=None if micro_batches == 1 else limit,
            world_size=1,
            in_blocks=in_blocks,
        )
        shares = [self._share(pieces, seed) for seed in range(NUM_STEPS)]
        self._shares = [share.pin_memory() for share in shares] if torch.cuda.is_available() else shares

    def __iter__(self) -> Iterator[RankBatch]:
        return itertools.cycle(self._shares)

    def _share(self, pieces: int, seed: int) -> RankBatch:
        draws = np.random.default_rng(seed)
        order = draws.permutation(len(self.lengths[0]))
        source, target = (side[order] for side in self.lengths)
        corpus: Any = SimpleNamespace(source=_store(source, pieces, draws), target=_store(target, pieces, draws))
        [rows] = rank_rows(source, target, self.shape, 1)
        return collate(corpus, rows, SPECIAL, self.shape, num_target_tokens=int(target.sum()))


def _lengths(tokens: int, mean_length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return lengths of pairs with at most `tokens` a side, spread like those of sentences."""
    draws = np.random.default_rng(1)
    most = 2 * tokens // mean_length + 2
    longest = min(LONGEST * mean_length // MEAN_LENGTH, tokens // 3)
    source = np.clip(draws.gamma(2.5, mean_length / 2.5, most).astype(np.int64), 2, longest)
    target = np.clip(source + draws.integers(-3, 4, most), 2, longest)
    count = int((np.maximum(source.cumsum(), target.cumsum()) <= tokens).sum())
    return source[:count], target[:count]


def _store(lengths: NDArray[np.int64], pieces: int, draws: np.random.Generator) -> SimpleNamespace:
    """Return random sentences of these lengths, which include the end symbol, in place of a side of a corpus."""
    tokens = draws.integers(4, pieces, int((lengths - 1).sum()), dtype=np.int32)
    return SimpleNamespace(tokens=tokens, lengths=lengths - 1, offsets=np.cumsum([0, *(lengths - 1)]))
