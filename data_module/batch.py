"""Batches and their collation: packed micro-batches for training, padded batches for validation."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from data_module.corpus.store import ParallelCorpus, TokenStore

MIN_PADDING_TOKENS = 16
"""A row of constant length ends with at least this many tokens of padding."""
_VARYING_MULTIPLE = 16
"""Any other row has a multiple of this many tokens, with one or more tokens of padding."""
_SIMILAR_SHARE, _SIMILAR_TOKENS = 0.8, 4
"""A pair joins the group of a longer pair if it has this share of the longer pair's tokens, or at most 4 fewer."""


class RowShape(NamedTuple):
    """The shape of all micro-batches."""

    source_tokens: int
    """Length of the row of sources, padding included."""
    target_tokens: int
    """The same for targets."""
    sentences: int
    """Number of sentences of a row: those of its pairs, those that its padding is divided into, and empty ones."""
    longest: int
    """Length of the longest sentence of the corpus, including EOS."""
    per_rank: int
    """Number of micro-batches per rank and optimizer step; one more where sentences happen not to fit."""
    constant: bool = True
    """Whether all rows are padded to these lengths; if not, a row is as long as its sentences need."""

    @property
    def max_pairs(self) -> int:
        """Maximum number of pairs of a micro-batch, so that sentences are left even for a row of padding only."""
        return self.sentences - padding_sentences(self.source_tokens, self.target_tokens, self.longest)


def padding_sentences(source_tokens: int, target_tokens: int, longest: int) -> int:
    """Return the number of sentences that so much padding is divided into, the same on both sides.

    None may be longer than the longest of the corpus, because attention kernels are launched for that length.
    """
    return ceil(max(source_tokens, target_tokens) / longest)


@dataclass(frozen=True)
class SpecialIds:
    """Ids of the tokenizer's special pieces."""

    pad: int
    bos: int
    eos: int
    unk: int | None = None
    """Not among the pieces that a search may choose; None if no id is unknown."""


class LengthGroup(NamedTuple):
    """Sentence pairs of similar length that follow one another in the rows of a micro-batch."""

    num_pairs: int
    longest_source: int
    """Length of the longest source, including EOS."""
    longest_target: int
    """The same for targets."""


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch of training: a row of source sentences and a row of target sentences.

    Shapes: R is the length of the source row and M that of the target row, constant if `RowShape.constant`; N is the
    number of sentences of a row, which is always constant. Sentences lie end to end, the longest first. Padding
    follows, whose ids and labels are the padding symbol and which no result depends on. It is divided into sentences
    too, not longer than the corpus's longest. Empty sentences come last.
    """

    source: Tensor
    """int32 [R]: tokens and EOS of each sentence."""
    source_positions: Tensor
    """int32 [R]: each token's position in its sentence, from 0."""
    source_offsets: Tensor
    """int32 [N + 1]: sentence i is `source[source_offsets[i] : source_offsets[i + 1]]`."""
    target_input: Tensor
    """int32 [M]: the decoder's input: BOS and tokens of each sentence."""
    target_output: Tensor
    """int32 [M]: the labels: tokens and EOS of each sentence."""
    target_positions: Tensor
    """int32 [M]."""
    target_offsets: Tensor
    """int32 [N + 1], as for the source."""
    groups: list[LengthGroup]
    """The pairs' sentences as groups of similar length, in the order in which they lie in the rows."""
    longest: int
    """Length of the longest sentence of the corpus, including EOS."""


class PackedShape(NamedTuple):
    """What the host knows of a packed micro-batch without waiting for a device."""

    lengths: dict[str, int]
    """Length of each tensor of the `PackedBatch`, by its name, in the order in which they lie in `RankBatch.flat`."""
    groups: list[LengthGroup]
    """See `PackedBatch`."""


@dataclass
class RankBatch:
    """One rank's micro-batches of one optimizer step, in one array: a single copy moves them to a process or a GPU."""

    flat: Tensor
    """int32: the tensors of all micro-batches, one after another."""
    shapes: list[PackedShape]
    """Where they are in `flat`, for each micro-batch. Never empty: a rank without pairs has one micro-batch that is all
    padding, so that every rank takes part in the same collectives."""
    longest: int
    """See `PackedBatch`."""
    num_target_tokens: int
    """Number of target tokens in the global batch, over all ranks. The loss is divided by it."""
    epoch: int
    index: int
    """Index of the global batch in its epoch."""
    num_batches: int
    """Number of global batches in this epoch."""
    pairs: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """int64 [pairs]: the indices of this rank's pairs in the corpus; on the CPU."""
    num_tokens: int = 0
    """Number of source and target tokens in `flat`, without padding."""

    @property
    def micro_batches(self) -> list[PackedBatch]:
        """The micro-batches, as views of `flat`."""
        batches, start = [], 0
        for lengths, groups in self.shapes:
            end = start + sum(lengths.values())
            tensors = zip(lengths, self.flat[start:end].split(list(lengths.values())), strict=True)
            batches.append(PackedBatch(**dict(tensors), groups=groups, longest=self.longest))
            start = end
        return batches

    @property
    def num_row_tokens(self) -> int:
        """Number of source and target tokens in `flat`, including padding."""
        return sum(shape.lengths["source"] + shape.lengths["target_output"] for shape in self.shapes)

    # A worker sends tensors as bytes: PyTorch would share file descriptors, for which this process must connect to it.
    def __getstate__(self) -> dict[str, object]:
        return {name: value.numpy() if isinstance(value, Tensor) else value for name, value in vars(self).items()}

    def __setstate__(self, state: dict[str, object]) -> None:
        for name, value in state.items():
            setattr(self, name, torch.from_numpy(value) if isinstance(value, np.ndarray) else value)

    def to(self, device: torch.device | str) -> "RankBatch":
        """Return a copy on another device; the host does not wait for it. Lightning calls this for each step."""
        return replace(self, flat=self.flat.to(device, non_blocking=True))

    def pin_memory(self) -> "RankBatch":
        """Return a copy in page-locked memory, for asynchronous copies to a GPU."""
        return replace(self, flat=self.flat.pin_memory())


def collate(
    corpus: "ParallelCorpus",
    micro_batches: list[NDArray[np.integer]],
    special: SpecialIds,
    shape: RowShape,
    *,
    num_target_tokens: int,
    epoch: int = 0,
    index: int = 0,
    num_batches: int = 1,
) -> RankBatch:
    """Collate one rank's pairs, using array operations only.

    `micro_batches` has, for each micro-batch, an array of pairs as indices into the corpus. For the arguments after
    `shape`, see `RankBatch`.
    """
    micro_batches = [longest_first(corpus, pairs) for pairs in micro_batches]
    arrays: list[NDArray[np.integer]] = []
    shapes, num_tokens = [], 0
    for pairs in micro_batches:
        lengths = corpus.lengths(pairs)
        packed = _pack(corpus, pairs, special, shape)
        arrays += packed.values()
        shapes.append(PackedShape({name: len(array) for name, array in packed.items()}, length_groups(*lengths)))
        num_tokens += sum(int(side.sum()) for side in lengths)
    return RankBatch(
        flat=torch.from_numpy(np.concatenate(arrays, dtype=np.int32)),
        shapes=shapes,
        longest=shape.longest,
        num_target_tokens=num_target_tokens,
        epoch=epoch,
        index=index,
        num_batches=num_batches,
        pairs=torch.from_numpy(np.concatenate(micro_batches).astype(np.int64)),
        num_tokens=num_tokens,
    )


def longest_first(corpus: "ParallelCorpus", pairs: NDArray[np.integer]) -> NDArray[np.integer]:
    """Return pairs in descending order of the length of their longer side."""
    return pairs[np.argsort(-np.maximum(*corpus.lengths(pairs)), kind="stable")]


def length_groups(source_lengths: NDArray[np.integer], target_lengths: NDArray[np.integer]) -> list[LengthGroup]:
    """Divide sentences into groups in which none is much shorter than the first one.

    Lengths are [pairs], in descending order of the longer side. Without pairs there is one group, of a single token of
    padding, so that every weight has a gradient.
    """
    if len(source_lengths) == 0:
        return [LengthGroup(1, 1, 1)]
    lengths = np.maximum(source_lengths, target_lengths)
    groups, first = [], 0
    while first < len(lengths):
        shortest = min(lengths[first] - _SIMILAR_TOKENS, ceil(_SIMILAR_SHARE * lengths[first]))
        end = int(np.searchsorted(-lengths, -shortest, "right"))
        source, target = (int(side[first:end].max()) for side in (source_lengths, target_lengths))
        groups.append(LengthGroup(end - first, source, target))
        first = end
    return groups


def _pack(
    corpus: "ParallelCorpus", pairs: NDArray[np.integer], special: SpecialIds, shape: RowShape
) -> dict[str, NDArray[np.integer]]:
    """Return the tensors of a micro-batch of these pairs by their names in `PackedBatch`."""
    source_lengths, target_lengths = corpus.lengths(pairs)
    source_offsets, target_offsets = _end_to_end(source_lengths, target_lengths, shape)
    source, source_positions = _lay_out(corpus.source, pairs, source_lengths, source_offsets, special)
    target_output, target_positions = _lay_out(corpus.target, pairs, target_lengths, target_offsets, special)
    # Each token's input is the label before it. This gives each sentence's first token, and the padding, the EOS of the
    # sentence before.
    target_input = np.roll(target_output, 1)
    target_input[target_offsets[: len(pairs)]] = special.bos
    target_input[target_offsets[len(pairs)] :] = special.pad
    return {
        "source": source,
        "source_positions": source_positions,
        "source_offsets": source_offsets,
        "target_input": target_input,
        "target_output": target_output,
        "target_positions": target_positions,
        "target_offsets": target_offsets,
    }


def _end_to_end(
    source: NDArray[np.int64], target: NDArray[np.int64], shape: RowShape
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Place sentences of these lengths end to end; return the offsets of both sides.

    Sentence i of the target attends to sentence i of the source, so padding is as many sentences on both sides.
    """
    sizes = [shape.source_tokens, shape.target_tokens]
    if not shape.constant:
        sizes = [(int(lengths.sum()) // _VARYING_MULTIPLE + 1) * _VARYING_MULTIPLE for lengths in (source, target)]
    num_padding = padding_sentences(sizes[0] - int(source.sum()), sizes[1] - int(target.sum()), shape.longest)
    return (
        _offsets(source, sizes[0], num_padding, shape.sentences),
        _offsets(target, sizes[1], num_padding, shape.sentences),
    )


def _offsets(lengths: NDArray[np.int64], row_tokens: int, num_padding: int, num_sentences: int) -> NDArray[np.int64]:
    """Return where the sentences of a row begin, and where the last one ends: [num_sentences + 1].

    Example, a row of 14 tokens: sentences of 4 and 3 tokens, two sentences of padding, an empty one:

        A A A A B B B . . . . . . .
        0       4     7       11    14 14

    >>> _offsets(np.array([4, 3]), 14, 2, 5).tolist()
    [0, 4, 7, 11, 14, 14]
    """
    # Empty sentences fill up the number that kernels are compiled and launched for.
    offsets = np.full(num_sentences + 1, row_tokens, np.int64)
    offsets[0] = 0
    offsets[1 : len(lengths) + 1] = np.cumsum(lengths)
    # Padding is divided evenly, so that no sentence is longer than the longest. What follows each of its sentences is
    # rounded down, so that the first one has a token on both sides: a rank without pairs computes it.
    padding = row_tokens - int(lengths.sum())
    following = np.arange(num_padding)[::-1] * padding // num_padding
    offsets[len(lengths) + 1 : len(lengths) + num_padding + 1] = row_tokens - following
    return offsets


def _lay_out(
    store: "TokenStore",
    pairs: NDArray[np.integer],
    lengths: NDArray[np.int64],
    offsets: NDArray[np.int64],
    special: SpecialIds,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Lay sentences out in a row, of `offsets[-1]` tokens; sentence i begins at `offsets[i]`.

    Returns the row's ids, and each token's position in its sentence.
    """
    ids, positions = np.full(offsets[-1], special.pad, np.int32), np.zeros(offsets[-1], np.int32)
    # `arange` counts the tokens of all sentences; subtracting those of earlier sentences counts within a sentence.
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    places = np.repeat(offsets[: len(pairs)], lengths) + within
    positions[places] = within
    is_eos = within == np.repeat(lengths - 1, lengths)
    in_store = np.repeat(store.offsets[pairs].astype(np.int64), lengths) + within
    ids[places[~is_eos]] = store.tokens[in_store[~is_eos]]
    ids[places[is_eos]] = special.eos
    return ids, positions


GPU_BATCH_TOKENS = 16_384
"""Upper bound on the padded source tokens that a search on a GPU decodes at the same time. A step of a search takes as
long for hundreds of sentences as for ten there, because launching its kernels takes the longest."""


def length_batches(
    lengths: Sequence[int],
    max_tokens: float,
    max_sentences: int | None = None,
    avoids_masks: bool = True,
    shortest: int = 16,
) -> Iterator[list[int]]:
    """Yield the indices of each batch, longest sentences first because they need the most memory.

    A batch ends before it would exceed `max_tokens` padded tokens or `max_sentences`; a longer sentence is a batch of
    its own. With `avoids_masks`, a batch that is half full also ends where the length changes, because sentences of one
    length need no mask. Sentences shorter than `shortest` count as that long, since the memory of a search grows with
    its answers too. Sentences of one token, the end symbol, are left out.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if lengths[index] <= 1:
            break
        if batch:
            longest = max(lengths[batch[0]], shortest)
            is_full = longest * (len(batch) + 1) > max_tokens or len(batch) == max_sentences
            is_half_full = longest * len(batch) * 2 >= max_tokens
            if is_full or (avoids_masks and is_half_full and lengths[index] < lengths[batch[-1]]):
                yield batch
                batch = []
        batch.append(index)
    if batch:
        yield batch


@dataclass
class PaddedBatch:
    """Pairs of similar length, padded to rectangles, for validation.

    Shapes: B is the number of pairs; S and T are the longest source and target, including EOS.
    """

    source: Tensor
    """int32 [B, S]: tokens, EOS, padding."""
    source_mask: Tensor | None
    """bool [B, S], True at tokens and False at padding; None if all sources have S tokens."""
    target_input: Tensor
    """int32 [B, T]: the decoder's input: BOS, tokens. Positions after a sentence's last token hold arbitrary ids."""
    target_output: Tensor
    """int32 [B, T]: the labels: tokens, EOS, padding."""
    pairs: Tensor
    """int32 [B]: indices into the corpus."""
    is_filler: bool = False
    """Whether the batch stands for one that only other ranks have. Its labels are all padding; with it, every rank
    takes part in the same collectives."""
    is_translated: bool = True
    """Whether validation also translates the sources of this batch."""

    def to(self, device: torch.device | str) -> "PaddedBatch":
        """Return a copy on another device; the host does not wait for it. Lightning calls this for each batch."""
        tensors: dict[str, Any] = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **{name: value.to(device, non_blocking=True) for name, value in tensors.items()})


def pad_batch(
    corpus: "ParallelCorpus",
    pairs: NDArray[np.integer],
    special: SpecialIds,
    is_translated: bool = True,
    is_filler: bool = False,
) -> PaddedBatch:
    """Return pairs, as indices [B] into the corpus, as a `PaddedBatch`. The labels of a filler are all padding."""
    lengths, sides = corpus.lengths(pairs), []
    for store, side_lengths in zip((corpus.source, corpus.target), lengths, strict=True):
        offsets = np.arange(len(side_lengths) + 1) * side_lengths.max()
        ids, _ = _lay_out(store, pairs, side_lengths, offsets, special)
        sides.append(torch.from_numpy(ids.reshape(len(side_lengths), -1)))
    source, labels = sides
    begin = torch.full((len(pairs), 1), special.bos, dtype=torch.int32)
    return PaddedBatch(
        source=source,
        source_mask=None if (lengths[0] == source.size(1)).all() else source != special.pad,
        target_input=torch.cat([begin, labels[:, :-1]], 1),
        target_output=torch.full_like(labels, special.pad) if is_filler else labels,
        pairs=torch.from_numpy(np.asarray(pairs).astype(np.int32)),
        is_filler=is_filler,
        is_translated=is_translated,
    )
