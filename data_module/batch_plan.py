"""Which pairs make which optimizer step, and which of them a rank takes. Pure functions of lengths and seeds.

A *group* holds pairs of nearly one source length and like target length. A *global batch*, one optimizer step, is
a random set of groups, and a function of (lengths, settings, seed, epoch) alone: the number of ranks only decides
who computes what. Lengths count the end symbol; *cells* are a group's pairs times its longest length, a side.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FULL_ENOUGH = 0.9
"""A global batch filled to this share on one side is closed; otherwise the next group is cut to fill it."""


class Group(NamedTuple):
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
    """The epoch's global batches, `len(plan)` of them; `plan[i]` is a list of groups."""

    def __init__(
        self,
        order: NDArray[np.uint32],
        group_starts: NDArray[np.int64],
        group_lengths: NDArray[np.uint16],
        batch_starts: NDArray[np.int64],
    ) -> None:
        self._order = order  # pair indices, group by group
        self._group_starts = group_starts  # [groups + 1] into order
        self._group_lengths = group_lengths  # [groups, 2] source and target length
        self._batch_starts = batch_starts  # [batches + 1] into groups

    def __len__(self) -> int:
        return len(self._batch_starts) - 1

    def __getitem__(self, index: int) -> list[Group]:
        return [
            Group(
                self._order[self._group_starts[group] : self._group_starts[group + 1]],
                int(self._group_lengths[group, 0]),
                int(self._group_lengths[group, 1]),
            )
            for group in range(self._batch_starts[index], self._batch_starts[index + 1])
        ]


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
    order, starts, lengths = _cut_groups(source_lengths, target_lengths, group_tokens, random)
    return _fill_batches(order, starts, lengths, batch_tokens, random)


def plan_in_order(
    source_lengths: NDArray[np.integer], target_lengths: NDArray[np.integer], group_tokens: int
) -> list[Group]:
    """The same groups every time, for validation; the longest sentences first, so that memory peaks at once."""
    random = np.random.Generator(np.random.PCG64(0))
    longest = int(max(source_lengths.max(), target_lengths.max(), group_tokens))
    order, starts, lengths = _cut_groups(source_lengths, target_lengths, longest, random)
    groups = [
        Group(order[starts[i] : starts[i + 1]], int(lengths[i, 0]), int(lengths[i, 1])) for i in range(len(starts) - 1)
    ]
    return sorted(groups, key=lambda group: -group.source_length)


def _cut_groups(
    source_lengths: NDArray[np.integer],
    target_lengths: NDArray[np.integer],
    group_tokens: int,
    random: np.random.Generator,
) -> tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.int64]]:
    """Pair order, group starts [groups + 1] into it, and group lengths [groups, 2]."""
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
    return order, starts, lengths


def _sorted_by_length(
    source_lengths: NDArray[np.integer], target_lengths: NDArray[np.integer], random: np.random.Generator
) -> tuple[NDArray[np.uint32], NDArray[np.uint16], NDArray[np.uint16]]:
    """Pairs by source length up and target length down, equal ones shuffled, so that they meet others each epoch.

    One sort of 64-bit numbers that hold both lengths and the shuffled place: a second for ten million pairs.
    """
    shuffled = random.permutation(len(source_lengths)).astype(np.uint32)
    key = source_lengths.astype(np.uint64)[shuffled]
    key <<= 16
    key |= 0xFFFF - target_lengths.astype(np.uint64)[shuffled]
    key <<= 32
    key |= np.arange(len(key), dtype=np.uint64)
    key.sort()
    order = shuffled[key.astype(np.uint32)]
    key >>= 32
    return order, (key >> 16).astype(np.uint16), 0xFFFF - key.astype(np.uint16)


def _fill_batches(
    order: NDArray[np.uint32],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    batch_tokens: int,
    random: np.random.Generator,
) -> EpochPlan:
    """Groups in random order, poured into batches; one that would not fit is cut, so that no batch is left thin."""
    parts: list[NDArray[np.uint32]] = []
    widths: list[tuple[int, int]] = []
    batch_starts = [0]
    source_room = target_room = batch_tokens
    thin = (1.0 - FULL_ENOUGH) * batch_tokens
    group_starts, group_lengths = starts.tolist(), lengths.tolist()
    for group in random.permutation(len(lengths)).tolist():
        first, end = group_starts[group], group_starts[group + 1]
        source_length, target_length = group_lengths[group]
        while first < end:
            fitting = min(end - first, source_room // source_length, target_room // target_length)
            if fitting < end - first and (fitting == 0 or min(source_room, target_room) <= thin):
                batch_starts.append(len(parts))
                source_room = target_room = batch_tokens
                continue
            parts.append(order[first : first + fitting])
            widths.append((source_length, target_length))
            source_room -= fitting * source_length
            target_room -= fitting * target_length
            first += fitting
    batch_starts.append(len(parts))
    return EpochPlan(
        np.concatenate(parts),
        np.cumsum([0, *map(len, parts)], dtype=np.int64),
        np.array(widths, dtype=np.uint16),
        np.array(batch_starts, dtype=np.int64),
    )


def share_of_rank(groups: list[Group], rank: int, world_size: int, max_tokens: int) -> list[Group]:
    """The micro-batches of one rank: whole groups by cost, slices where whole ones would leave ranks waiting.

    All ranks together have every pair once. A rank may get nothing when there are fewer pairs than ranks.

    Args:
        groups: a global batch.
        max_tokens: padded cells of a micro-batch on either side, at most.
    """
    pieces = [piece for group in groups for piece in _sliced(group, max_tokens)]
    while True:
        shares = _deal(pieces, world_size)
        costs = [sum(piece.cells() for piece in share) for share in shares]
        largest = max(range(len(pieces)), key=lambda i: pieces[i].cells())
        even = max(costs) * world_size <= 1.1 * sum(costs)
        if even or len(pieces) >= 4 * world_size or len(pieces[largest].pairs) == 1:
            return shares[rank]
        group = pieces.pop(largest)
        half = (len(group.pairs) + 1) // 2
        pieces += [group._replace(pairs=group.pairs[:half]), group._replace(pairs=group.pairs[half:])]


def _sliced(group: Group, max_tokens: int) -> list[Group]:
    """A group in as few equal slices as fit."""
    fitting = max(1, max_tokens // max(group.source_length, group.target_length))
    count = -(-len(group.pairs) // fitting)
    return [group._replace(pairs=pairs) for pairs in np.array_split(group.pairs, count)]


def _deal(pieces: list[Group], world_size: int) -> list[list[Group]]:
    """Longest job first, each to the rank with the least to do."""
    shares: list[list[Group]] = [[] for _ in range(world_size)]
    costs = [0] * world_size
    for piece in sorted(pieces, key=lambda piece: -piece.cells()):
        rank = costs.index(min(costs))
        shares[rank].append(piece)
        costs[rank] += piece.cells()
    return shares
