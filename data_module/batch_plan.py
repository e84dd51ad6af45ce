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

    pairs: NDArray[np.int64]
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
        order: NDArray[np.int64],
        group_starts: NDArray[np.int64],
        group_lengths: NDArray[np.int64],
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
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Pair order, group starts [groups + 1] into it, and group lengths [groups, 2]."""
    shuffled = random.permutation(len(source_lengths))
    source = source_lengths[shuffled].astype(np.int64)
    target = target_lengths[shuffled].astype(np.int64)
    # By source length up and target length down; equal pairs stay shuffled, so that they meet others each epoch.
    sort = np.argsort(source << 32 | ((1 << 31) - target), kind="stable")
    order, source, target = shuffled[sort], source[sort], target[sort]
    ends: list[int] = []
    leftovers: list[NDArray[np.int64]] = []
    kept: list[NDArray[np.int64]] = []
    num_kept = 0
    bounds = np.flatnonzero(np.diff(source)) + 1
    for start, end in zip([0, *bounds.tolist()], [*bounds.tolist(), len(source)], strict=True):
        length = int(source[start])
        first = start
        while first < end:
            # Target lengths fall, so the group's first pair is its longest.
            room = group_tokens // max(length, int(target[first]))
            if first + room > end and 2 * (end - first) < room:
                break  # less than half a group of this source length is left
            first = min(first + room, end)
            ends.append(num_kept + first - start)
        kept.append(np.arange(start, first))
        num_kept += first - start
        leftovers.append(np.arange(first, end))
    # What is left of each source length makes groups of nearly one source length.
    rest = np.concatenate(leftovers)
    rest_source, rest_target = source[rest], target[rest]
    first = 0
    while first < len(rest):
        window = slice(first, first + group_tokens // int(rest_source[first]))
        longest = np.maximum(rest_source[window], np.maximum.accumulate(rest_target[window]))
        fitting = np.arange(1, len(longest) + 1) * longest <= group_tokens
        # Beyond a tenth longer than the first, padding would cost more than a small group.
        fitting &= rest_source[window] * 10 <= rest_source[first] * 11 + 10
        first += int(np.count_nonzero(np.logical_and.accumulate(fitting)))
        ends.append(num_kept + first)
    sort = np.concatenate([*kept, rest])
    order, source, target = order[sort], source[sort], target[sort]
    starts = np.array([0, *ends], dtype=np.int64)
    lengths = np.stack([np.maximum.reduceat(side, starts[:-1]) for side in (source, target)], 1)
    return order, starts, lengths


def _fill_batches(
    order: NDArray[np.int64],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    batch_tokens: int,
    random: np.random.Generator,
) -> EpochPlan:
    """Groups in random order, poured into batches; one that would not fit is cut, so that no batch is left thin."""
    firsts: list[int] = []
    counts: list[int] = []
    widths: list[tuple[int, int]] = []
    batch_starts = [0]
    source_room = target_room = batch_tokens
    thin = (1.0 - FULL_ENOUGH) * batch_tokens
    group_starts, group_lengths = starts.tolist(), lengths.tolist()
    for group in random.permutation(len(lengths)).tolist():
        first, left = group_starts[group], group_starts[group + 1] - group_starts[group]
        source_length, target_length = group_lengths[group]
        while left:
            fitting = min(left, source_room // source_length, target_room // target_length)
            if fitting < left and (fitting == 0 or min(source_room, target_room) <= thin):
                batch_starts.append(len(firsts))
                source_room = target_room = batch_tokens
                continue
            firsts.append(first)
            counts.append(fitting)
            widths.append((source_length, target_length))
            source_room -= fitting * source_length
            target_room -= fitting * target_length
            first, left = first + fitting, left - fitting
    batch_starts.append(len(firsts))
    new_starts = np.concatenate([[0], np.cumsum(counts)])
    positions = np.repeat(np.array(firsts) - new_starts[:-1], counts) + np.arange(len(order))
    return EpochPlan(
        order[positions], new_starts, np.array(widths, dtype=np.int64), np.array(batch_starts, dtype=np.int64)
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
