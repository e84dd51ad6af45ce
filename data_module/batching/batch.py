"""Batches and their collation: the padded ids of a micro-batch, and one rank's micro-batches of an optimizer step."""

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
    """One micro-batch.

    Shapes: B is the number of pairs; S and T are the longest source and target, including EOS.
    """

    source: Tensor
    """int32 [B, S]: pieces, EOS, padding."""
    source_mask: Tensor | None
    """bool [B, S], True at tokens and False at padding; None if all sources have S tokens."""
    target_input: Tensor
    """int32 [B, T]: the decoder's input: BOS, pieces. Positions after a row's last piece hold arbitrary ids."""
    target_output: Tensor
    """int32 [B, T]: the labels: pieces, EOS, padding."""
    pairs: Tensor
    """int32 [B]: indices into the corpus."""


@dataclass(frozen=True)
class RankBatch:
    """One rank's micro-batches of one optimizer step.

    They are stored in one array, so that a single copy moves them to another process or to a GPU.
    """

    ids: Tensor
    """int32: for each micro-batch its pairs [B], sources [B, S] and targets [B, 1 + T], which begin with BOS."""
    shapes: list[tuple[int, int, int]]
    """(B, S, T) of each micro-batch. Never empty: see `is_filler`."""
    pad: int
    is_filler: bool
    """The optimizer step has no pairs for this rank. It runs one pair whose labels are all padding, so that every rank
    takes part in the same collectives."""
    num_target_tokens: int
    """Number of target tokens in the global batch, over all ranks. The loss is divided by it."""
    epoch: int
    index: int
    """Index of the global batch in its epoch."""
    num_batches: int
    """Number of global batches in this epoch."""
    one_length: list[bool]
    """For each micro-batch, whether all its sources have the same length, so that they need no mask."""
    num_tokens: int = 0
    """Number of source and target tokens in `ids`, without padding."""

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """The micro-batches, as views of `ids`."""
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
        # The default shares file descriptors, for which the receiving process must connect back to this one.
        fields = {**vars(self), "ids": self.ids.numpy()}
        return _from_numpy, (fields,)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "RankBatch":
        """Return a copy on another device."""
        return replace(self, ids=self.ids.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "RankBatch":
        """Return a copy in page-locked memory, for asynchronous copies to a GPU."""
        return replace(self, ids=self.ids.pin_memory())


def _from_numpy(fields: dict[str, Any]) -> RankBatch:
    return RankBatch(**{**fields, "ids": torch.from_numpy(fields["ids"])})


def collate(
    corpus: "ParallelCorpus",
    buckets: list[LengthBucket],
    special: SpecialIds,
    *,
    num_target_tokens: int,
    is_filler: bool = False,
    epoch: int = 0,
    index: int = 0,
    num_batches: int = 1,
) -> RankBatch:
    """Return the pairs of length buckets as a `RankBatch`, one micro-batch per bucket, using array operations only."""
    shapes = [(len(bucket.pairs), bucket.source_length, bucket.target_length) for bucket in buckets]
    ids = np.empty(sum(pairs * (source + target + 2) for pairs, source, target in shapes), dtype=np.int32)
    one_length, start, num_tokens = [], 0, 0
    for (pairs, source_length, target_length), bucket in zip(shapes, buckets, strict=True):
        middle, end = start + pairs * (source_length + 1), start + pairs * (source_length + target_length + 2)
        ids[start : start + pairs] = bucket.pairs
        lengths = _fill(ids[start + pairs : middle].reshape(pairs, source_length), corpus.source, bucket.pairs, special)
        one_length.append(bool((lengths == source_length).all()))
        target = ids[middle:end].reshape(pairs, target_length + 1)
        target[:, 0] = special.bos
        target_lengths = _fill(target[:, 1:], corpus.target, bucket.pairs, special)
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
    """Write pieces, EOS and padding into `ids` [B, L]; return the lengths [B], including EOS."""
    lengths = store.lengths[pairs].astype(np.int64)
    columns = np.arange(ids.shape[1])
    inside = columns < lengths[:, None]
    positions = store.offsets[pairs].astype(np.int64)[:, None] + columns
    ids[:] = special.pad
    ids[inside] = store.tokens[positions[inside]]
    ids[np.arange(len(pairs)), lengths] = special.eos
    return lengths + 1
