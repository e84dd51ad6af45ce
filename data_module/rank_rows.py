"""Divide a global batch among the micro-batches of all ranks, at equal cost.

A *row* holds the source or the target sentences of one micro-batch, one after another, and padding after the last one.
For flash attention, all micro-batches have rows of the same two lengths, so that a GPU always runs the same shapes.
Lengths include EOS.
"""

from math import ceil

import numpy as np
from numpy.typing import NDArray

from data_module.batch import MIN_PADDING_TOKENS, RowShape, padding_sentences

ROW_SLACK = 1.05
"""A row has this many times the tokens of an even share, since sentences cannot be divided exactly."""
ROW_MULTIPLE = 128
"""Rows have a multiple of this many tokens, which suits matrix products."""
_EVEN_COST_LENGTH = 1024
"""The sentence length at which attention, which grows with its square, costs about as much as everything else."""
_CANDIDATES = 4
"""A bundle of pairs may go to any of this many rows of about the same cost."""
_BUNDLES, _SINGLES = 16, 48
"""With more pairs per row than both together, this many bundles of several pairs and of one are dealt per row."""


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
    sentences = ceil(1.25 * expected) + 16 + padding_sentences(lengths[0], lengths[1], longest)
    # A micro-batch's tensors lie in one array, and Inductor copies an input that is not aligned to 16 bytes. So the
    # number of offsets, which is sentences + 1, is made a multiple of four, as the lengths of rows are.
    sentences += -(sentences + 1) % 4
    return RowShape(lengths[0], lengths[1], sentences, longest, per_rank, constant)


def _row_length(share: float, batch_tokens: int, num_rows: int, longest: int) -> int:
    """Return the length of a row. A single one needs no slack beyond the largest batch."""
    tokens = min(batch_tokens, ROW_SLACK * share) if num_rows == 1 else ROW_SLACK * share / num_rows
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
    >>> shape = RowShape(source_tokens=128, target_tokens=128, sentences=40, longest=9, per_rank=1)
    >>> for rank in range(2):
    ...     [pairs.tolist() for pairs in rank_rows(source_lengths, target_lengths, shape, 2, rank)]
    [[1, 3, 6, 4]]
    [[5, 7, 2, 0]]
    """
    source, target = source_lengths.astype(np.int64), target_lengths.astype(np.int64)
    # Every rank computes the pairs of all ranks from the same numbers, so that no rank has to ask another one. The
    # number of micro-batches, in which it deals its own, is not the same on ranks with another limit for their device.
    own = _deal(source, target, world_size)[rank]
    rows = []
    left = np.empty(0, np.intp)
    for row in _deal(source[own], target[own], shape.per_rank) if len(own) else ():
        pairs = own[row]
        fitting = _fitting(pairs, source, target, shape)
        rows.append(pairs[:fitting])
        left = np.concatenate([left, pairs[fitting:]])
    # Rows differ by about a sentence, for which they have `ROW_SLACK`. Pairs that still do not fit go to one more
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
    return min(int(fits.sum()), shape.max_pairs)


def cost(source_lengths: NDArray[np.int64], target_lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the cost of pairs: their tokens, and what attention costs, in units of 1/`_EVEN_COST_LENGTH` token."""
    attention = source_lengths**2 + source_lengths * target_lengths + target_lengths**2
    return (source_lengths + target_lengths) * _EVEN_COST_LENGTH + attention


def _deal(
    source: NDArray[np.int64],
    target: NDArray[np.int64],
    num_rows: int,
    bundles: int = _BUNDLES,
    singles: int = _SINGLES,
) -> list[NDArray[np.intp]]:
    """Divide pairs among rows, at equal cost and with equal numbers of tokens on each side.

    To divide them among ranks, all that a rank gets counts as a row.

    The work in Python grows with the number of rows only, not with that of pairs. All sums are of integers, so that
    the order in which a processor adds does not change the result.

    Example, eight pairs: to one row, to two, and to two as many pairs are dealt. In the order of their cost, they are
    1 5 3 7 6 2 0 4. The last call deals the bundles 5 7 0 and 3 2 4, and the single pairs 1 and 6:

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
    if num_rows == 1:
        return [order]
    # Rows of equal cost may still differ in how many of their tokens are target tokens, and would not fit in a constant
    # length. `excess` is a pair's number of target tokens minus that of an average pair with equally many
    # tokens, times the batch's tokens. If a row's excess adds up to 0, it has the batch's ratio of source and target.
    excess = target * (source.sum() + target.sum()) - (source + target) * target.sum()
    costs, excess = costs[order], excess[order]
    # Single pairs of all costs even out what the bundles of several leave.
    num_bundles, num_singles = bundles * num_rows, singles * num_rows
    bundle_of = np.arange(len(order))
    if len(order) > num_bundles + num_singles:
        is_single = np.zeros(len(order), bool)
        is_single[np.arange(num_singles) * len(order) // num_singles] = True
        bundle_of[is_single] = num_bundles + np.arange(num_singles)
        # Sorted pairs go to bundles in turn, so that bundles differ by less than the most expensive pair.
        bundle_of[~is_single] = np.arange(len(order) - num_singles) % num_bundles
    sums = np.zeros((2, bundle_of.max() + 1), np.int64)
    np.add.at(sums[0], bundle_of, costs)
    np.add.at(sums[1], bundle_of, excess)
    row_of = _deal_bundles(sums[0], sums[1], num_rows)[bundle_of]
    ends = np.cumsum(np.bincount(row_of, minlength=num_rows))
    return np.split(order[np.argsort(row_of, kind="stable")], ends[:-1])


def _deal_bundles(costs: NDArray[np.int64], excess: NDArray[np.int64], num_rows: int) -> NDArray[np.intp]:
    """Return the row of each bundle. Expensive ones are dealt first, because cheap ones even out the differences left.

    In each round the cheapest rows get one bundle each: the cheaper the row, the more expensive the bundle. A row that
    already costs as much as the cheapest row will cost with its bundle gets none. Among `_CANDIDATES` rows of about the
    same cost, bundles are exchanged so that each row's excess comes nearer to 0.
    """
    order = np.argsort(-costs, kind="stable")
    totals, row_excess = np.zeros((2, num_rows), np.int64)
    row_of = np.empty(len(costs), np.intp)
    first = 0
    while first < len(order):
        rows = np.argsort(totals, kind="stable")
        num_open = int(np.searchsorted(totals[rows], totals[rows[0]] + costs[order[first]]))
        bundles = order[first : first + num_open]
        rows = rows[: len(bundles)]
        # Among candidates, the bundle of the least excess goes to the row of the most.
        candidates = np.arange(len(bundles)) // _CANDIDATES
        bundles = bundles[np.lexsort((excess[bundles], candidates))]
        rows = rows[np.lexsort((-row_excess[rows], candidates))]
        row_of[bundles] = rows
        totals[rows] += costs[bundles]
        row_excess[rows] += excess[bundles]
        first += len(bundles)
    return row_of
