"""The Batch type and its collation: padded id arrays of a micro-batch, and a rank's share of an optimizer step."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from data_module.batching.batch_plan import LengthBucket

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from data_module.corpus.store import ParallelCorpus, TokenStore


@dataclass(frozen=True)
class SpecialIds:
    """Ids of the tokenizer's special pieces."""

    pad: int
    bos: int
    eos: int


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch. Shapes: B pairs, S and T the longest source and target, end symbol counted."""

    source: Tensor
    """int32 [B, S]: pieces, end symbol, padding."""
    source_mask: Tensor | None
    """bool [B, S], True where a token stands; None where all sources have S tokens."""
    target_input: Tensor
    """int32 [B, T]: begin symbol, pieces: what the decoder sees. Beyond a row's last piece stands anything."""
    target_output: Tensor
    """int32 [B, T]: pieces, end symbol, padding: what it has to say."""
    pairs: Tensor
    """int32 [B]: indices into the corpus."""


@dataclass(frozen=True)
class RankBatch:
    """What one rank computes of one optimizer step, as one array: it moves to another process or a GPU at once."""

    ids: Tensor
    """int32: for each micro-batch its pairs [B], sources [B, S] and targets [B, 1 + T], the begin symbol first."""
    shapes: list[tuple[int, int, int]]
    """(B, S, T) of each micro-batch. Never empty: see `is_filler`."""
    pad: int
    is_filler: bool
    """The rank has nothing to do: it runs one pair whose targets are all padding, so that collectives match."""
    num_target_tokens: int
    """Target tokens of the whole global batch, over all ranks: what the loss is divided by."""
    epoch: int
    index: int
    """The global batch's place in its epoch."""
    num_batches: int
    """Global batches in this epoch."""
    one_length: list[bool]
    """Whether a micro-batch's sources are all of one length, and need no mask."""
    num_tokens: int = 0
    """Source and target tokens of this rank's share, of all its cells."""

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """Views into `ids`."""
        batches, start = [], 0
        for (pairs, source_length, target_length), one_length in zip(self.shapes, self.one_length, strict=True):
            sizes = [pairs, pairs * source_length, pairs * (target_length + 1)]
            indices, source, target = self.ids[start : start + sum(sizes)].split(sizes)
            source, target = source.view(pairs, source_length), target.view(pairs, target_length + 1)
            output = target[:, 1:]
            batches.append(
                MicroBatch(
                    source=source,
                    source_mask=None if one_length else source != self.pad,
                    target_input=target[:, :-1],
                    target_output=torch.full_like(output, self.pad) if self.is_filler else output,
                    pairs=indices,
                )
            )
            start += sum(sizes)
        return batches

    def __reduce__(self) -> tuple[Any, ...]:
        """To another process as bytes: for a tensor's file that one would have to knock at this one's door."""
        fields = {**vars(self), "ids": self.ids.numpy()}
        return _share_of_bytes, (fields,)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "RankBatch":
        """The share on another device."""
        return replace(self, ids=self.ids.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "RankBatch":
        """The share in page-locked memory, for asynchronous copies."""
        return replace(self, ids=self.ids.pin_memory())


def _share_of_bytes(fields: dict[str, Any]) -> RankBatch:
    return RankBatch(**{**fields, "ids": torch.from_numpy(fields["ids"])})


def collate(
    corpus: "ParallelCorpus",
    groups: list[LengthBucket],
    special: SpecialIds,
    *,
    num_target_tokens: int,
    is_filler: bool = False,
    epoch: int = 0,
    index: int = 0,
    num_batches: int = 1,
) -> RankBatch:
    """Groups of pairs as one array, built by whole arrays."""
    shapes = [(len(group.pairs), group.source_length, group.target_length) for group in groups]
    ids = np.empty(sum(pairs * (source + target + 2) for pairs, source, target in shapes), dtype=np.int32)
    one_length, start, num_tokens = [], 0, 0
    for (pairs, source_length, target_length), group in zip(shapes, groups, strict=True):
        middle, end = start + pairs * (source_length + 1), start + pairs * (source_length + target_length + 2)
        ids[start : start + pairs] = group.pairs
        lengths = _fill(ids[start + pairs : middle].reshape(pairs, source_length), corpus.source, group.pairs, special)
        one_length.append(bool((lengths == source_length).all()))
        target = ids[middle:end].reshape(pairs, target_length + 1)
        target[:, 0] = special.bos
        target_lengths = _fill(target[:, 1:], corpus.target, group.pairs, special)
        num_tokens += int(lengths.sum()) + int(target_lengths.sum())
        start = end
    return RankBatch(
        ids=torch.from_numpy(ids),
        shapes=shapes,
        pad=special.pad,
        is_filler=is_filler,
        num_target_tokens=num_target_tokens,
        epoch=epoch,
        index=index,
        num_batches=num_batches,
        one_length=one_length,
        num_tokens=0 if is_filler else num_tokens,
    )


def _fill(
    ids: "NDArray[np.int32]", store: "TokenStore", pairs: "NDArray[np.integer]", special: SpecialIds
) -> "NDArray[np.int64]":
    """Write pieces, end symbol and padding into ids [B, L]; returns lengths [B], the end symbol counted."""
    lengths = store.lengths[pairs].astype(np.int64)
    columns = np.arange(ids.shape[1])
    inside = columns < lengths[:, None]
    cells = store.offsets[pairs].astype(np.int64)[:, None] + columns
    ids[:] = special.pad
    ids[inside] = store.tokens[cells[inside]]
    ids[np.arange(len(pairs)), lengths] = special.eos
    return lengths + 1
