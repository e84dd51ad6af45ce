"""Which pairs make which optimizer step, and which of them a rank takes. Pure functions of lengths and seeds.

A *group* holds pairs of nearly one source length and like target length. A *global batch*, one optimizer step, is
a random set of groups, and a function of (lengths, settings, seed, epoch) alone: the number of ranks only decides
who computes what. Lengths count the end symbol; *cells* are a group's pairs times its longest length, a side.
"""

from bisect import bisect_right
from heapq import heapreplace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_module.batching.shuffle import Shuffle

FULL_ENOUGH = 0.9
"""A global batch filled to this share on one side is closed; otherwise the next group is cut to fill it."""
MAX_IMBALANCE = 1.1
"""Groups are cut where whole ones would give a rank more than this many times its even share."""
MIN_SLICE = 0.05
"""Of an even share: so little is not worth a micro-batch of its own."""


class LengthBucket(NamedTuple):
    """Pairs that one micro-batch can hold without much padding."""

    pairs: NDArray[np.integer]
    """[n] indices into the corpus."""
    source_length: int
    target_length: int
    """The longest of the group, end symbol counted."""

    def cells(self) -> int:
        """Padded cells of both sides: the group's cost."""
        return len(self.pairs) * (self.source_length + self.target_length)


class EpochPlan:
    """The epoch's global batches, `len(plan)` of them; `plan[i]` is a list of groups.

    It is a view of one flat array, so that it may lie in memory or in a file that processes share.
    """

    def __init__(self, numbers: NDArray[np.uint32]) -> None:
        """`numbers` as `numbers` of another plan gave them."""
        self.numbers = numbers
        num_batches, num_groups = int(numbers[0]), int(numbers[1])
        sizes = [num_batches + 1, num_batches, num_groups + 1, num_groups, num_groups]
        parts = np.split(numbers, np.cumsum([2, *sizes]))[1:]
        self._batch_starts = parts[0]  # into groups
        self._batch_target_tokens = parts[1]
        self._group_starts = parts[2]  # into order
        self._source_lengths, self._target_lengths = parts[3], parts[4]  # the longest of each group
        self._order = parts[5]  # pair indices, group by group

    def __len__(self) -> int:
        return len(self._batch_target_tokens)

    def __getitem__(self, index: int) -> list[LengthBucket]:
        groups = slice(int(self._batch_starts[index]), int(self._batch_starts[index + 1]))
        starts = self._group_starts[groups.start : groups.stop + 1].tolist()
        source, target = self._source_lengths[groups].tolist(), self._target_lengths[groups].tolist()
        return [LengthBucket(self._order[starts[i] : starts[i + 1]], source[i], target[i]) for i in range(len(source))]

    def target_tokens(self, index: int) -> int:
        """Target tokens of a global batch, end symbols counted."""
        return int(self._batch_target_tokens[index])


def plan_epoch(
    source_lengths: NDArray[np.integer],
    target_lengths: NDArray[np.integer],
    *,
    batch_tokens: int,
    group_tokens: int,
    seed: int,
    epoch: int,
) -> EpochPlan:
    """All pairs, each once, as global batches in random order.

    Args:
        source_lengths, target_lengths: [pairs], end symbol counted.
        batch_tokens: padded cells of a global batch on either side, at most.
        group_tokens: padded cells of a group on either side, at most.
        seed, epoch: the order is a function of them.

    Raises ValueError when a pair is longer than a group may be, or a group larger than a batch.
    """
    if len(source_lengths) == 0:
        raise ValueError("there are no pairs to plan")
    longest = int(max(source_lengths.max(), target_lengths.max()))
    if longest > group_tokens or group_tokens > batch_tokens:
        raise ValueError(
            f"the longest sentence has {longest} tokens, groups hold {group_tokens} and batches {batch_tokens}: "
            "they must not fall; raise batches.group_tokens or batches.batch_tokens, or lower corpus.max_tokens"
        )
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch])))
    cut = _cut_groups(source_lengths, target_lengths, group_tokens, random)
    return _fill_batches(cut, batch_tokens, random)


def plan_in_order(
    source_lengths: NDArray[np.integer], target_lengths: NDArray[np.integer], group_tokens: int
) -> list[LengthBucket]:
    """The same groups every time, for validation; the longest sentences first, so that memory peaks at once."""
    random = np.random.Generator(np.random.PCG64(0))
    longest = int(max(source_lengths.max(), target_lengths.max(), group_tokens))
    cut = _cut_groups(source_lengths, target_lengths, longest, random)
    groups = [
        LengthBucket(cut.order[cut.starts[i] : cut.starts[i + 1]], int(source), int(target))
        for i, (source, target) in enumerate(cut.lengths)
    ]
    return sorted(groups, key=lambda group: -group.source_length)


class _Groups(NamedTuple):
    """All pairs, cut into groups."""

    order: NDArray[np.uint32]
    """[pairs] indices into the corpus."""
    target: NDArray[np.uint16]
    """[pairs] target lengths, in that order."""
    starts: NDArray[np.int64]
    """[groups + 1] into order."""
    lengths: NDArray[np.int64]
    """[groups, 2] longest source and target."""


def _cut_groups(
    source_lengths: NDArray[np.integer],
    target_lengths: NDArray[np.integer],
    group_tokens: int,
    random: np.random.Generator,
) -> _Groups:
    """Whole groups of one source length first, then what was left of each length, in groups of nearly one."""
    order, source, target = _sorted_by_length(source_lengths, target_lengths, random)
    ends: list[int] = []
    kept: list[slice] = []
    leftovers: list[slice] = []
    num_kept = 0
    bounds = (np.flatnonzero(source[1:] != source[:-1]) + 1).tolist()
    for start, end in zip([0, *bounds], [*bounds, len(source)], strict=True):
        length = int(source[start])
        first = start
        while first < end:
            # Target lengths fall, so the group's first pair is its longest.
            room = group_tokens // max(length, int(target[first]))
            if first + room > end and 2 * (end - first) < room:
                break  # less than half a group of this source length is left
            first = min(first + room, end)
            ends.append(num_kept + first - start)
        kept.append(slice(start, first))
        num_kept += first - start
        leftovers.append(slice(first, end))
    # What is left of each source length makes groups of nearly one source length.
    rest_source, rest_target = (np.concatenate([side[part] for part in leftovers]) for side in (source, target))
    first = 0
    while first < len(rest_source):
        window = slice(first, first + group_tokens // int(rest_source[first]))
        longest = np.maximum(rest_source[window], np.maximum.accumulate(rest_target[window])).astype(np.int64)
        fitting = np.arange(1, len(longest) + 1) * longest <= group_tokens
        # Beyond a tenth longer than the first, padding would cost more than a small group.
        fitting &= rest_source[window].astype(np.int64) * 10 <= int(rest_source[first]) * 11 + 10
        first += int(np.count_nonzero(np.logical_and.accumulate(fitting)))
        ends.append(num_kept + first)
    order, source, target = (np.concatenate([side[p] for p in kept + leftovers]) for side in (order, source, target))
    starts = np.array([0, *ends], dtype=np.int64)
    lengths = np.stack([np.maximum.reduceat(side, starts[:-1]) for side in (source, target)], 1).astype(np.int64)
    return _Groups(order, target, starts, lengths)


def _sorted_by_length(
    source_lengths: NDArray[np.integer], target_lengths: NDArray[np.integer], random: np.random.Generator
) -> tuple[NDArray[np.uint32], NDArray[np.uint16], NDArray[np.uint16]]:
    """Pairs by source length up and target length down, equal ones shuffled, so that they meet others each epoch.

    One sort of 64-bit numbers that hold both lengths and a place that gives the index back.
    """
    shuffle = Shuffle(random)
    key = source_lengths.astype(np.uint64)
    key <<= 16
    key |= 0xFFFF - target_lengths.astype(np.uint16)
    key <<= 32
    key |= shuffle.places(len(key))
    key.sort()
    order = shuffle.indices(key.astype(np.uint32))
    key >>= 32
    target = 0xFFFF - key.astype(np.uint16)
    key >>= 16
    return order, key.astype(np.uint16), target


def _fill_batches(cut: _Groups, batch_tokens: int, random: np.random.Generator) -> EpochPlan:
    """Groups in random order, poured into batches; one that would not fit is cut, so that no batch is left thin."""
    parts: list[NDArray[np.uint32]] = []
    widths: list[tuple[int, int]] = []
    batch_starts, batch_target_tokens = [0], [0]
    source_room = target_room = batch_tokens
    thin = (1.0 - FULL_ENOUGH) * batch_tokens
    group_starts, group_lengths = cut.starts.tolist(), cut.lengths.tolist()
    for group in random.permutation(len(group_lengths)).tolist():
        first, end = group_starts[group], group_starts[group + 1]
        source_length, target_length = group_lengths[group]
        while first < end:
            fitting = min(end - first, source_room // source_length, target_room // target_length)
            if fitting < end - first and (fitting == 0 or min(source_room, target_room) <= thin):
                batch_starts.append(len(parts))
                batch_target_tokens.append(0)
                source_room = target_room = batch_tokens
                continue
            parts.append(cut.order[first : first + fitting])
            widths.append((source_length, target_length))
            batch_target_tokens[-1] += int(cut.target[first : first + fitting].sum())
            source_room -= fitting * source_length
            target_room -= fitting * target_length
            first += fitting
    batch_starts.append(len(parts))
    starts = np.cumsum([0, *map(len, parts)])
    counts = [len(batch_target_tokens), len(parts)]
    numbers = [counts, batch_starts, batch_target_tokens, starts, *zip(*widths, strict=True)]
    return EpochPlan(np.concatenate([np.asarray(part, dtype=np.uint32) for part in (*numbers, *parts)]))


def rank_batch(groups: list[LengthBucket], rank: int, world_size: int, max_tokens: int) -> list[LengthBucket]:
    """The micro-batches of one rank: whole groups by cost, slices where whole ones would leave ranks waiting.

    All ranks together have every pair once. A rank may get nothing when there are fewer pairs than ranks.

    Args:
        groups: a global batch.
        max_tokens: padded cells of a micro-batch on either side, at most.
    """
    pieces = [piece for group in groups for piece in _sliced(group, max_tokens)]
    for slices in dict.fromkeys((1, max(1, round(world_size / len(pieces))))):
        shares = _deal([part for piece in pieces for part in _in_slices(piece, slices)], world_size)
        costs = [sum(piece.cells() for piece in share) for share in shares]
        if max(costs) * world_size <= MAX_IMBALANCE * sum(costs):
            return shares[rank]
    return _split_evenly(pieces, rank, world_size)


def _sliced(group: LengthBucket, max_tokens: int) -> list[LengthBucket]:
    """A group in as few equal slices as fit."""
    fitting = max(1, max_tokens // max(group.source_length, group.target_length))
    return _in_slices(group, -(-len(group.pairs) // fitting))


def _in_slices(group: LengthBucket, count: int) -> list[LengthBucket]:
    count = min(count, len(group.pairs))
    return [group] if count == 1 else [group._replace(pairs=pairs) for pairs in np.array_split(group.pairs, count)]


def _deal(pieces: list[LengthBucket], world_size: int) -> list[list[LengthBucket]]:
    """Longest job first, each to the rank with the least to do."""
    shares: list[list[LengthBucket]] = [[] for _ in range(world_size)]
    least = [(0, rank) for rank in range(world_size)]
    for piece in sorted(pieces, key=lambda piece: -piece.cells()):
        cost, rank = least[0]
        shares[rank].append(piece)
        heapreplace(least, (cost + piece.cells(), rank))
    return shares


def _split_evenly(pieces: list[LengthBucket], rank: int, world_size: int) -> list[LengthBucket]:
    """Laid end to end, the pieces between two of as many equal marks as there are ranks; few are cut, and in two."""
    ends = list(accumulate(piece.cells() for piece in pieces))
    even = ends[-1] / world_size

    def cut(mark: int) -> tuple[int, int]:
        """The piece and the pair in it that a mark falls on, or the piece's end where only a crumb is left beside."""
        if mark == world_size:
            return len(pieces), 0
        place = mark * even
        index = bisect_right(ends, place)
        piece = pieces[index]
        before, after = place - ends[index] + piece.cells(), ends[index] - place
        if min(before, after) < MIN_SLICE * even:
            return (index, 0) if before <= after else (index + 1, 0)
        return index, round(before * len(piece.pairs) / piece.cells())

    (first, start), (last, end) = cut(rank), cut(rank + 1)
    bounds = [
        (piece, start if index == first else 0, end if index == last else len(piece.pairs))
        for index, piece in enumerate(pieces[first : last + 1], first)
    ]
    return [piece._replace(pairs=piece.pairs[begin:stop]) for piece, begin, stop in bounds if begin < stop]
