"""Divide a global batch into rows of constant length, for each rank.

A *row* holds the source or the target sentences of one micro-batch, one after another, and padding after the last one.
For flash attention, all micro-batches have rows of the same two lengths, so that a GPU always runs the same shapes.
Lengths include EOS.
"""

from math import ceil

import numpy as np
from numpy.typing import NDArray

from data_module.batch import MIN_PADDING_TOKENS, RowShape, padding_segments

ROW_SLACK = 1.05
"""A row has this many times the tokens of an even share, since sentences cannot be divided exactly."""
ROW_MULTIPLE = 128
"""Rows have a multiple of this many tokens, which suits matrix products."""
_EVEN_COST_LENGTH = 1024
"""The sentence length at which attention, which grows with its square, costs about as much as everything else."""
_CANDIDATES = 4
"""A pair may go to any of this many parts of about the same cost; the parts are the micro-batches of all ranks."""
_BUNDLES, _SINGLES = 16, 48
"""With more pairs per part than both together, pairs are dealt as this many bundles and single pairs per part."""


def row_shape(
    mean_lengths: tuple[float, float],
    longest: int,
    *,
    batch_tokens: int,
    max_tokens_per_device: int | None,
    world_size: int,
    constant: bool = True,
) -> RowShape:
    """Return the shape of micro-batches.

    `mean_lengths` are those of the sources and of the targets of the corpus, and `longest` is the length of its longest
    sentence. `world_size` is the number of ranks. See `BatchSettings` and `RowShape` for the others.

    Raises ValueError if the longest sentence does not fit in a row.
    """
    limit = max_tokens_per_device or batch_tokens
    for key, most in (("batch_tokens", batch_tokens), ("max_tokens_per_device", limit)):
        if longest > most:
            raise ValueError(
                f"batches.{key} {most} is less than the longest sentence, {longest} tokens; raise it, or lower "
                "corpus.max_tokens"
            )
    # The mean number of tokens on each side of a batch that is full on the side with more tokens.
    shares = [batch_tokens * mean / max(mean_lengths) for mean in mean_lengths]
    # The fewest micro-batches whose rows fit on a device. The loop ends, since a row of just the longest sentence fits.
    per_rank = 1
    while True:
        lengths = [_row_length(share, batch_tokens, world_size * per_rank, longest) for share in shares]
        if max(lengths) <= _rounded(limit):
            break
        per_rank += 1
    # The number of sentences varies from row to row. It hardly ever exceeds 1.25 times the mean plus 16; where it does,
    # `rank_rows` makes another micro-batch.
    expected = max(lengths) / max(mean_lengths)
    segments = ceil(1.25 * expected) + 16 + padding_segments(lengths[0], lengths[1], longest)
    # A micro-batch's tensors lie in one array, and Inductor copies an input that is not aligned to 16 bytes. So the
    # number of offsets, which is segments + 1, is made a multiple of four, as the lengths of rows are.
    segments += -(segments + 1) % 4
    return RowShape(lengths[0], lengths[1], segments, longest, per_rank, constant)


def _row_length(share: float, batch_tokens: int, parts: int, longest: int) -> int:
    """Return the length of a row. With a single part, no slack is needed beyond the largest batch."""
    tokens = min(batch_tokens, ROW_SLACK * share) if parts == 1 else ROW_SLACK * share / parts
    return _rounded(max(tokens, longest))


def _rounded(tokens: float) -> int:
    """Return the length of a row that holds this many tokens and the minimum of padding."""
    return ceil((tokens + MIN_PADDING_TOKENS) / ROW_MULTIPLE) * ROW_MULTIPLE


def rank_rows(
    source_lengths: NDArray[np.integer],
    target_lengths: NDArray[np.integer],
    shape: RowShape,
    world_size: int,
    rank: int,
) -> list[NDArray[np.intp]]:
    """Divide a global batch among ranks, and return the micro-batches of one rank.

    Lengths are [n], those of the pairs of the global batch. The pairs of each micro-batch are returned as indices into
    them. All ranks together have every pair once. If the rank's pairs do not fit in `shape.per_rank` micro-batches,
    there is one more. A rank without pairs has one empty micro-batch.

    Example, eight pairs on two ranks of one micro-batch each, whose rows have 128 tokens a side:

    >>> source_lengths, target_lengths = np.array([3, 9, 4, 6, 2, 8, 5, 7]), np.array([4, 8, 4, 7, 3, 9, 4, 6])
    >>> shape = RowShape(source_tokens=128, target_tokens=128, segments=40, longest=9, per_rank=1)
    >>> for rank in range(2):
    ...     [pairs.tolist() for pairs in rank_rows(source_lengths, target_lengths, shape, 2, rank)]
    [[1, 3, 6, 4]]
    [[5, 7, 2, 0]]
    """
    source, target = source_lengths.astype(np.int64), target_lengths.astype(np.int64)
    # Every rank computes the parts of all ranks from the same numbers, so that no rank has to ask another one.
    parts = _deal(source, target, world_size * shape.per_rank)
    rows = []
    left = np.empty(0, np.intp)
    for part in parts[rank * shape.per_rank : (rank + 1) * shape.per_rank]:
        fitting = _fitting(part, source, target, shape)
        rows.append(part[:fitting])
        left = np.concatenate([left, part[fitting:]])
    # Parts differ by about a sentence, for which rows have `ROW_SLACK`. Pairs that still do not fit go to one more
    # micro-batch. That does not change the gradient, which is a sum over tokens.
    while len(left):
        fitting = _fitting(left, source, target, shape)
        rows.append(left[:fitting])
        left = left[fitting:]
    return [row for row in rows if len(row)] or [np.empty(0, np.intp)]


def _fitting(pairs: NDArray[np.intp], source: NDArray[np.int64], target: NDArray[np.int64], shape: RowShape) -> int:
    """Return how many of the pairs fit in a micro-batch."""
    fits = np.cumsum(source[pairs]) <= shape.source_tokens - MIN_PADDING_TOKENS
    fits &= np.cumsum(target[pairs]) <= shape.target_tokens - MIN_PADDING_TOKENS
    return min(int(fits.sum()), shape.max_sentences)


def cost(source_lengths: NDArray[np.int64], target_lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the cost of pairs: their tokens, and what attention costs, in units of 1/`_EVEN_COST_LENGTH` token."""
    attention = source_lengths**2 + source_lengths * target_lengths + target_lengths**2
    return (source_lengths + target_lengths) * _EVEN_COST_LENGTH + attention


def _deal(
    source: NDArray[np.int64],
    target: NDArray[np.int64],
    num_parts: int,
    bundles: int = _BUNDLES,
    singles: int = _SINGLES,
) -> list[NDArray[np.intp]]:
    """Divide pairs into parts of equal cost and of equal numbers of tokens on each side.

    The work in Python grows with the number of parts only, not with that of pairs. All sums are of integers, so that
    the order in which a processor adds does not change the result.

    Example, eight pairs: as one part, as two, and as two in the way of many pairs. By cost they are 1 5 3 7 6 2 0 4;
    the bundles are then 5 7 0 and 3 2 4, the singles 1 and 6:

    >>> source, target = np.array([3, 9, 4, 6, 2, 8, 5, 7]), np.array([4, 8, 4, 7, 3, 9, 4, 6])
    >>> _deal(source, target, 1)
    [array([1, 5, 3, 7, 6, 2, 0, 4])]
    >>> _deal(source, target, 2)
    [array([1, 3, 6, 4]), array([5, 7, 2, 0])]
    >>> _deal(source, target, 2, bundles=1, singles=1)
    [array([5, 7, 6, 0]), array([1, 3, 2, 4])]
    """
    costs = cost(source, target)
    order = np.argsort(-costs, kind="stable")
    if num_parts == 1:
        return [order]
    # Parts of equal cost may still differ in how many of their tokens are target tokens, and would not fit in rows of
    # constant length. `excess` is a pair's number of target tokens minus that of an average pair with equally many
    # tokens, times the batch's tokens. If a part's excess adds up to 0, it has the batch's ratio of source and target.
    excess = target * (source.sum() + target.sum()) - (source + target) * target.sum()
    costs, excess = costs[order], excess[order]
    # Single pairs of all costs even out what bundles leave.
    num_bundles, num_singles = bundles * num_parts, singles * num_parts
    item_of = np.arange(len(order))
    if len(order) > num_bundles + num_singles:
        is_single = np.zeros(len(order), bool)
        is_single[np.arange(num_singles) * len(order) // num_singles] = True
        item_of[is_single] = num_bundles + np.arange(num_singles)
        # Sorted pairs go to bundles in turn, so that bundles differ by less than the most expensive pair.
        item_of[~is_single] = np.arange(len(order) - num_singles) % num_bundles
    items = np.zeros((2, item_of.max() + 1), np.int64)
    np.add.at(items[0], item_of, costs)
    np.add.at(items[1], item_of, excess)
    part_of = _deal_items(items[0], items[1], num_parts)[item_of]
    ends = np.cumsum(np.bincount(part_of, minlength=num_parts))
    return np.split(order[np.argsort(part_of, kind="stable")], ends[:-1])


def _deal_items(costs: NDArray[np.int64], excess: NDArray[np.int64], num_parts: int) -> NDArray[np.intp]:
    """Return the part of each item. Expensive items are dealt first, because cheap ones even out the differences left.

    In each round the cheapest parts get one item each: the cheaper the part, the more expensive the item. A part that
    already costs as much as the cheapest part will cost with its item gets none. Among `_CANDIDATES` parts of about the
    same cost, items are exchanged so that each part's excess comes nearer to 0.
    """
    order = np.argsort(-costs, kind="stable")
    totals, part_excess = np.zeros((2, num_parts), np.int64)
    part_of = np.empty(len(costs), np.intp)
    first = 0
    while first < len(order):
        parts = np.argsort(totals, kind="stable")
        num_open = int(np.searchsorted(totals[parts], totals[parts[0]] + costs[order[first]]))
        items = order[first : first + num_open]
        parts = parts[: len(items)]
        # Within a group, the item of the least excess goes to the part of the most.
        group = np.arange(len(items)) // _CANDIDATES
        items = items[np.lexsort((excess[items], group))]
        parts = parts[np.lexsort((-part_excess[parts], group))]
        part_of[items] = parts
        totals[parts] += costs[items]
        part_excess[parts] += excess[items]
        first += len(items)
    return part_of
