"""The Batch type and its collation: padded id arrays of one micro-batch, and a rank's share of an optimizer step."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from data_module.batch_plan import Group

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from data_module.corpus import ParallelCorpus, TokenStore


@dataclass(frozen=True)
class SpecialIds:
    """Ids of the tokenizer's special pieces."""

    pad: int
    bos: int
    eos: int


@dataclass(frozen=True)
class Batch:
    """One micro-batch. Shapes: B pairs, S and T the longest source and target, end symbol counted."""

    source: Tensor
    """int64 [B, S]: pieces, end symbol, padding."""
    source_mask: Tensor | None
    """bool [B, S], True where a token stands; None where all sources have S tokens."""
    target_input: Tensor
    """int64 [B, T]: begin symbol, pieces, padding: what the decoder sees."""
    target_output: Tensor
    """int64 [B, T]: pieces, end symbol, padding: what it has to say."""
    pairs: Tensor
    """int64 [B]: indices into the corpus."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """The batch on another device."""
        return replace(self, **{k: v.to(device, non_blocking=non_blocking) for k, v in self._tensors().items()})

    def pin_memory(self) -> "Batch":
        """The batch in page-locked memory, for asynchronous copies."""
        return replace(self, **{k: v.pin_memory() for k, v in self._tensors().items()})

    def _tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class StepShare:
    """What one rank computes of one optimizer step."""

    micro_batches: list[Batch]
    """Never empty: a rank left with nothing gets one pair whose targets are all padding, so that collectives match."""
    num_target_tokens: int
    """Target tokens of the whole global batch, over all ranks: what the loss is divided by."""
    epoch: int
    index: int
    """The global batch's place in its epoch."""
    num_batches: int
    """Global batches in this epoch."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "StepShare":
        """The share on another device."""
        return replace(self, micro_batches=[b.to(device, non_blocking) for b in self.micro_batches])

    def pin_memory(self) -> "StepShare":
        """The share in page-locked memory."""
        return replace(self, micro_batches=[b.pin_memory() for b in self.micro_batches])


def collate(corpus: "ParallelCorpus", group: Group, special: SpecialIds) -> Batch:
    """A group's pairs as padded arrays, built by whole arrays."""
    source, lengths = _padded(corpus.source, group.pairs, special)
    target, _ = _padded(corpus.target, group.pairs, special)
    target_input = np.empty_like(target)
    target_input[:, 0] = special.bos
    target_input[:, 1:] = target[:, :-1]
    target_input[target_input == special.eos] = special.pad
    mask = None
    if lengths.min() != lengths.max():
        mask = torch.from_numpy(np.arange(source.shape[1]) < lengths[:, None])
    return Batch(
        source=torch.from_numpy(source),
        source_mask=mask,
        target_input=torch.from_numpy(target_input),
        target_output=torch.from_numpy(target),
        pairs=torch.from_numpy(np.array(group.pairs, dtype=np.int64)),
    )


def weightless(batch: Batch, special: SpecialIds) -> Batch:
    """The batch with nothing to predict: it costs a pass and adds zero to loss and gradients."""
    return replace(batch, target_output=torch.full_like(batch.target_output, special.pad))


def _padded(
    store: "TokenStore", pairs: "NDArray[np.int64]", special: SpecialIds
) -> "tuple[NDArray[np.int64], NDArray[np.int64]]":
    """Ids [B, L] with end symbol and padding, and lengths [B] with the end symbol counted."""
    lengths = store.lengths[pairs].astype(np.int64)
    columns = np.arange(int(lengths.max()) + 1)
    cells = store.offsets[pairs].astype(np.int64)[:, None] + columns
    inside = columns < lengths[:, None]
    ids = np.full(cells.shape, special.pad, dtype=np.int64)
    ids[inside] = store.tokens[cells[inside]]
    ids[np.arange(len(pairs)), lengths] = special.eos
    return ids, lengths + 1
