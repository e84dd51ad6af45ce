"""Plan which pairs form each optimizer step, and which of them each rank computes.

A *length bucket* holds pairs of nearly the same source length and similar target length. A *global batch*, which is
one optimizer step, is a random set of buckets. It depends only on (lengths, settings, seed, epoch); the number of ranks
only decides which rank computes which pairs. Lengths include EOS. The *padded tokens* of a side are the number of pairs
times the longest length.
"""

from bisect import bisect_right
from heapq import heapreplace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_module.batching.shuffle import Shuffle

MIN_FILL = 0.9
"""A global batch is closed if its fuller side reaches this fraction; otherwise the next bucket is split to fill it."""
MAX_IMBALANCE = 1.1
"""Buckets are split if whole ones would give a rank more than this many times the mean cost of a rank."""
MIN_SLICE = 0.05
"""Smallest slice of a bucket, as a fraction of the mean cost of a rank; a smaller micro-batch is inefficient."""


class LengthBucket(NamedTuple):
    """Pairs of similar length, which fit in one micro-batch with little padding."""

    pairs: NDArray[np.integer]
    """[n] indices into the corpus."""
    source_length: int
    target_length: int
    """Both lengths are the longest in the bucket, including EOS."""

    def padded_tokens(self) -> int:
        """Return the number of padded tokens of both sides, which is the bucket's cost."""
        return len(self.pairs) * (self.source_length + self.target_length)


class EpochPlan:
    """The global batches of one epoch: `len(plan)` of them; `plan[i]` is a list of length buckets.

    The plan is a view of one flat array, which may be in memory or in a file that processes share.
    """

    def __init__(self, numbers: NDArray[np.uint32]) -> None:
        """Create a view of `numbers`, which another plan's attribute `numbers` has returned."""
        self.numbers = numbers
        num_batches, num_buckets = int(numbers[0]), int(numbers[1])
        sizes = [num_batches + 1, num_batches, num_buckets + 1, num_buckets, num_buckets]
        parts = np.split(numbers, np.cumsum([2, *sizes]))[1:]
        self._batch_starts = parts[0]  # indices of buckets
        self._batch_target_tokens = parts[1]
        self._bucket_starts = parts[2]  # indices into the order
        self._source_lengths, self._target_lengths = parts[3], parts[4]  # longest in each bucket
        self._order = parts[5]  # pair indices, bucket by bucket

    def __len__(self) -> int:
        return len(self._batch_target_tokens)

    def __getitem__(self, index: int) -> list[LengthBucket]:
        buckets = slice(int(self._batch_starts[index]), int(self._batch_starts[index + 1]))
        starts = self._bucket_starts[buckets.start : buckets.stop + 1].tolist()
        source, target = self._source_lengths[buckets].tolist(), self._target_lengths[buckets].tolist()
        return [LengthBucket(self._order[starts[i] : starts[i + 1]], source[i], target[i]) for i in range(len(source))]

    def target_tokens(self, index: int) -> int:
        """Return the number of target tokens of a global batch, including EOS."""
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
    """Arrange all pairs, each exactly once, in global batches of random order.

    Args:
        source_lengths: [pairs], including EOS.
        target_lengths: [pairs], including EOS.
        batch_tokens: maximum padded tokens per side of a global batch.
        group_tokens: maximum padded tokens per side of a length bucket.
        seed: together with `epoch` determines the random order.
        epoch: index of the epoch.

    Raises:
        ValueError: there are no pairs, a pair is longer than a bucket may be, or a bucket larger than a batch.
    """
    if len(source_lengths) == 0:
        raise ValueError("there are no pairs to plan")
    longest = int(max(source_lengths.max(), target_lengths.max()))
    if longest > group_tokens or group_tokens > batch_tokens:
        raise ValueError(
            f"batches.group_tokens {group_tokens} must be at least {longest}, the tokens of the longest sentence, and"
            f" at most batches.batch_tokens {batch_tokens}; change it, or lower corpus.max_tokens"
        )
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch])))
    buckets = _make_buckets(source_lengths, target_lengths, group_tokens, random)
    return _fill_batches(buckets, batch_tokens, random)


def plan_in_order(
    source_lengths: NDArray[np.integer], target_lengths: NDArray[np.integer], group_tokens: int
) -> list[LengthBucket]:
    """Return length buckets for validation: the same ones every time, longest first, so that memory peaks early."""
    random = np.random.Generator(np.random.PCG64(0))
    longest = int(max(source_lengths.max(), target_lengths.max(), group_tokens))
    made = _make_buckets(source_lengths, target_lengths, longest, random)
    buckets = [
        LengthBucket(made.order[made.starts[i] : made.starts[i + 1]], int(source), int(target))
        for i, (source, target) in enumerate(made.lengths)
    ]
    return sorted(buckets, key=lambda bucket: -bucket.source_length)


class _Buckets(NamedTuple):
    """All pairs, divided into length buckets."""

    order: NDArray[np.uint32]
    """[pairs] indices into the corpus."""
    target: NDArray[np.uint16]
    """[pairs] target lengths in this order."""
    starts: NDArray[np.int64]
    """[buckets + 1] indices into `order`."""
    lengths: NDArray[np.int64]
    """[buckets, 2] longest source and target."""


def _make_buckets(
    source_lengths: NDArray[np.integer],
    target_lengths: NDArray[np.integer],
    group_tokens: int,
    random: np.random.Generator,
) -> _Buckets:
    """Make full buckets of one source length each, then buckets of similar lengths from the remaining pairs."""
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
            # Target lengths decrease, so the bucket's first pair is its longest.
            room = group_tokens // max(length, int(target[first]))
            if first + room > end and 2 * (end - first) < room:
                break  # less than half a bucket of this source length is left
            first = min(first + room, end)
            ends.append(num_kept + first - start)
        kept.append(slice(start, first))
        num_kept += first - start
        leftovers.append(slice(first, end))
    # Make buckets of similar source lengths from the remaining pairs.
    rest_source, rest_target = (np.concatenate([side[part] for part in leftovers]) for side in (source, target))
    first = 0
    while first < len(rest_source):
        window = slice(first, first + group_tokens // int(rest_source[first]))
        longest = np.maximum(rest_source[window], np.maximum.accumulate(rest_target[window])).astype(np.int64)
        fitting = np.arange(1, len(longest) + 1) * longest <= group_tokens
        # Sources more than a tenth longer than the first would cost more in padding than a smaller bucket does.
        fitting &= rest_source[window].astype(np.int64) * 10 <= int(rest_source[first]) * 11 + 10
        first += int(np.count_nonzero(np.logical_and.accumulate(fitting)))
        ends.append(num_kept + first)
    order, source, target = (np.concatenate([side[p] for p in kept + leftovers]) for side in (order, source, target))
    starts = np.array([0, *ends], dtype=np.int64)
    lengths = np.stack([np.maximum.reduceat(side, starts[:-1]) for side in (source, target)], 1).astype(np.int64)
    return _Buckets(order, target, starts, lengths)


def _sorted_by_length(
    source_lengths: NDArray[np.integer], target_lengths: NDArray[np.integer], random: np.random.Generator
) -> tuple[NDArray[np.uint32], NDArray[np.uint16], NDArray[np.uint16]]:
    """Sort pairs by increasing source length and decreasing target length.

    Pairs of equal lengths are shuffled, so that each epoch's buckets differ. The function sorts 64-bit numbers that
    hold both lengths and a shuffled position, from which the index is recovered.

    Returns:
        The order [pairs], as indices into the corpus, and the source and target lengths [pairs] in this order.
    """
    shuffle = Shuffle(random)
    key = source_lengths.astype(np.uint64)
    key <<= 16
    key |= 0xFFFF - target_lengths.astype(np.uint16)
    key <<= 32
    key |= shuffle.positions(len(key))
    key.sort()
    order = shuffle.indices(key.astype(np.uint32))
    key >>= 32
    target = 0xFFFF - key.astype(np.uint16)
    key >>= 16
    return order, key.astype(np.uint16), target


def _fill_batches(buckets: _Buckets, batch_tokens: int, random: np.random.Generator) -> EpochPlan:
    """Assign buckets to batches in random order; split a bucket that does not fit if the batch is below `MIN_FILL`."""
    parts: list[NDArray[np.uint32]] = []
    widths: list[tuple[int, int]] = []
    batch_starts, batch_target_tokens = [0], [0]
    source_room = target_room = batch_tokens
    max_room = (1.0 - MIN_FILL) * batch_tokens
    bucket_starts, bucket_lengths = buckets.starts.tolist(), buckets.lengths.tolist()
    for bucket in random.permutation(len(bucket_lengths)).tolist():
        first, end = bucket_starts[bucket], bucket_starts[bucket + 1]
        source_length, target_length = bucket_lengths[bucket]
        while first < end:
            fitting = min(end - first, source_room // source_length, target_room // target_length)
            if fitting < end - first and (fitting == 0 or min(source_room, target_room) <= max_room):
                batch_starts.append(len(parts))
                batch_target_tokens.append(0)
                source_room = target_room = batch_tokens
                continue
            parts.append(buckets.order[first : first + fitting])
            widths.append((source_length, target_length))
            batch_target_tokens[-1] += int(buckets.target[first : first + fitting].sum())
            source_room -= fitting * source_length
            target_room -= fitting * target_length
            first += fitting
    batch_starts.append(len(parts))
    starts = np.cumsum([0, *map(len, parts)])
    counts = [len(batch_target_tokens), len(parts)]
    numbers = [counts, batch_starts, batch_target_tokens, starts, *zip(*widths, strict=True)]
    return EpochPlan(np.concatenate([np.asarray(part, dtype=np.uint32) for part in (*numbers, *parts)]))


def rank_batch(buckets: list[LengthBucket], rank: int, world_size: int, max_tokens: int) -> list[LengthBucket]:
    """Return one rank's micro-batches of a global batch.

    Whole buckets are distributed by cost. Buckets are split if whole ones would leave ranks waiting for each other.
    Every pair goes to exactly one rank. A rank may get no pairs if there are fewer pairs than ranks.

    Args:
        buckets: the global batch.
        rank: the rank to return micro-batches for.
        world_size: number of ranks.
        max_tokens: maximum padded tokens per side of a micro-batch.
    """
    pieces = [piece for bucket in buckets for piece in _limit_size(bucket, max_tokens)]
    for slices in dict.fromkeys((1, max(1, round(world_size / len(pieces))))):
        assigned = _assign([part for piece in pieces for part in _split(piece, slices)], world_size)
        costs = [sum(piece.padded_tokens() for piece in one) for one in assigned]
        if max(costs) * world_size <= MAX_IMBALANCE * sum(costs):
            return assigned[rank]
    return _split_evenly(pieces, rank, world_size)


def _limit_size(bucket: LengthBucket, max_tokens: int) -> list[LengthBucket]:
    """Split a bucket into the smallest number of equal slices that each have at most `max_tokens` per side."""
    fitting = max(1, max_tokens // max(bucket.source_length, bucket.target_length))
    return _split(bucket, -(-len(bucket.pairs) // fitting))


def _split(bucket: LengthBucket, count: int) -> list[LengthBucket]:
    count = min(count, len(bucket.pairs))
    return [bucket] if count == 1 else [bucket._replace(pairs=pairs) for pairs in np.array_split(bucket.pairs, count)]


def _assign(pieces: list[LengthBucket], world_size: int) -> list[list[LengthBucket]]:
    """Assign the most expensive remaining piece to the rank with the lowest cost, until none remains."""
    assigned: list[list[LengthBucket]] = [[] for _ in range(world_size)]
    heap = [(0, rank) for rank in range(world_size)]
    for piece in sorted(pieces, key=lambda piece: -piece.padded_tokens()):
        cost, rank = heap[0]
        assigned[rank].append(piece)
        heapreplace(heap, (cost + piece.padded_tokens(), rank))
    return assigned


def _split_evenly(pieces: list[LengthBucket], rank: int, world_size: int) -> list[LengthBucket]:
    """Concatenate the pieces and cut them at `world_size - 1` equal marks; return this rank's section."""
    ends = list(accumulate(piece.padded_tokens() for piece in pieces))
    mean = ends[-1] / world_size

    def cut(mark: int) -> tuple[int, int]:
        """Return the piece and the pair at a mark, or the nearer end of the piece if a slice would be too small."""
        if mark == world_size:
            return len(pieces), 0
        position = mark * mean
        index = bisect_right(ends, position)
        piece = pieces[index]
        before, after = position - ends[index] + piece.padded_tokens(), ends[index] - position
        if min(before, after) < MIN_SLICE * mean:
            return (index, 0) if before <= after else (index + 1, 0)
        return index, round(before * len(piece.pairs) / piece.padded_tokens())

    (first, start), (last, end) = cut(rank), cut(rank + 1)
    bounds = [
        (piece, start if index == first else 0, end if index == last else len(piece.pairs))
        for index, piece in enumerate(pieces[first : last + 1], first)
    ]
    return [piece._replace(pairs=piece.pairs[begin:stop]) for piece, begin, stop in bounds if begin < stop]
