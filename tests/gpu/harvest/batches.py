"""Synthetic batches of the paper's size."""

import itertools
from collections.abc import Iterator

import numpy as np
import torch

from data_module.batching.batch import RankBatch, SpecialIds

SPECIAL = SpecialIds(pad=0, bos=2, eos=3)
# No length is a multiple of 8: such lengths need graphs of their own, which would take too long to compile.
LENGTHS = {
    "one of 25,000": [(27, 27)],
    "eight of 3,125": [(13, 14), (18, 19), (22, 23), (25, 26), (29, 30), (34, 35), (42, 43), (60, 61)],
    "one of 25,000, padded": [(27, 27)],
}
"""Source and target length of each micro-batch of a step."""
STEP_TOKENS = 25_000


class Shares:
    """An endless loader of a few different steps with the same shapes."""

    def __init__(self, name: str, pieces: int, tokens: int = STEP_TOKENS, pin: bool = False) -> None:
        self.padded = name.endswith("padded")
        lengths = LENGTHS[name]
        of_each = tokens // len(lengths)
        self.shapes = [(max(2, of_each // max(pair)), *pair) for pair in lengths]
        shares = [self._share(pieces, seed) for seed in range(4)]
        self._shares = [share.pin_memory() for share in shares] if pin else shares

    def __iter__(self) -> Iterator[RankBatch]:
        return itertools.cycle(self._shares)

    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Return source and target lengths of a step's pairs, without padding."""
        source, target = (np.repeat([s[i] for s in self.shapes], [s[0] for s in self.shapes]) for i in (1, 2))
        if self.padded:
            source[::2] -= 1
        return source, target

    def _share(self, pieces: int, seed: int) -> RankBatch:
        draws = torch.Generator().manual_seed(seed)
        parts = []
        for pairs, source_length, target_length in self.shapes:
            source = torch.randint(4, pieces, (pairs, source_length), generator=draws)
            source[:, -1] = SPECIAL.eos
            if self.padded:
                source[::2, -2], source[::2, -1] = SPECIAL.eos, SPECIAL.pad
            target = torch.randint(4, pieces, (pairs, target_length + 1), generator=draws)
            target[:, 0], target[:, -1] = SPECIAL.bos, SPECIAL.eos
            parts += [torch.arange(pairs), source.flatten(), target.flatten()]
        source_lengths, target_lengths = self.lengths()
        return RankBatch(
            ids=torch.cat(parts).int(),
            shapes=self.shapes,
            pad=SPECIAL.pad,
            is_filler=False,
            num_target_tokens=int(target_lengths.sum()),
            epoch=0,
            index=0,
            num_batches=1,
            one_length=[not self.padded] * len(self.shapes),
            num_tokens=int(source_lengths.sum() + target_lengths.sum()),
        )
