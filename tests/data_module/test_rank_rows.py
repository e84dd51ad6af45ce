"""Rows: every pair on one rank, equal cost, and sizes within the constant shape."""

from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_module.batch import MIN_PADDING_TOKENS, RowShape
from data_module.rank_rows import cost, rank_rows, row_shape
from tests.data_module.test_batch_plan import lengths


def shape(source: np.ndarray, target: np.ndarray, **options: int | None) -> RowShape:
    means, longest = (float(source.mean()), float(target.mean())), int(max(source.max(), target.max()))
    given_options = {"batch_tokens": int(max(source.sum(), target.sum())), "max_tokens_per_device": None, **options}
    return row_shape(means, longest, world_size=given_options.pop("world_size", 1), **given_options)


def divided(source: np.ndarray, target: np.ndarray, row: RowShape, world_size: int) -> list[list[np.ndarray]]:
    """Divide, and check what always holds."""
    ranks = [rank_rows(source, target, row, world_size, rank) for rank in range(world_size)]
    assert sorted(pair for rows in ranks for one in rows for pair in one.tolist()) == list(range(len(source)))
    for rows in ranks:
        assert rows
        for one in rows:
            assert source[one].sum() <= row.source_tokens - MIN_PADDING_TOKENS
            assert target[one].sum() <= row.target_tokens - MIN_PADDING_TOKENS
            assert len(one) + ceil(max(row.source_tokens, row.target_tokens) / row.longest) <= row.sentences
    return ranks


def test_cost_by_hand() -> None:
    assert cost(np.array([1024, 10]), np.array([1024, 0])).tolist() == [(2048 + 3 * 1024) * 1024, 10 * 1024 + 100]


@pytest.mark.parametrize("world_size", [2, 3, 4, 8, 15])
def test_ranks_have_equal_cost(world_size: int) -> None:
    """Within 1 % from 200 sentences a rank on; on each side within the row's slack."""
    source, target = lengths(pairs=200 * world_size)
    ranks = divided(source, target, shape(source, target, world_size=world_size), world_size)
    assert [len(rows) for rows in ranks] == [1] * world_size
    costs = [cost(source[rows[0]].astype(np.int64), target[rows[0]].astype(np.int64)).sum() for rows in ranks]
    assert max(costs) / np.mean(costs) < 1.01
    for side in (source, target):
        tokens = [side[rows[0]].sum() for rows in ranks]
        assert max(tokens) / np.mean(tokens) < 1.03


@pytest.mark.parametrize("world_size", [2, 7, 16, 64])
def test_few_sentences_a_rank(world_size: int) -> None:
    """The most and the least expensive rank differ by no more than the most expensive pair."""
    source, target = lengths(pairs=10 * world_size)
    ranks = divided(source, target, shape(source, target, world_size=world_size), world_size)
    every = cost(source.astype(np.int64), target.astype(np.int64))
    costs = [sum(every[one].sum() for one in rows) for rows in ranks]
    assert max(costs) - min(costs) <= 2 * every.max()


@pytest.mark.parametrize(("world_size", "pairs"), [(8, 600), (40, 400)])
def test_many_sentences_a_rank(world_size: int, pairs: int) -> None:
    """Most are dealt in bundles. A few are many times longer than the others."""
    source, target = lengths(pairs=pairs * world_size)
    source[:3] = target[:3] = 500
    ranks = divided(source, target, shape(source, target, world_size=world_size), world_size)
    every = cost(source.astype(np.int64), target.astype(np.int64))
    costs = [every[rows[0]].sum() for rows in ranks]
    assert max(costs) <= 1.001 * np.mean(costs)
    ratios = [source[rows[0]].sum() / target[rows[0]].sum() for rows in ranks]
    assert ratios == pytest.approx([source.sum() / target.sum()] * world_size, rel=0.01)


def test_more_ranks_than_pairs() -> None:
    pair = np.array([5, 6]), np.array([7, 8])
    ranks = divided(*pair, shape(*pair, world_size=3), 3)
    assert sorted(len(rows[0]) for rows in ranks) == [0, 1, 1]


def test_row_lengths_by_hand() -> None:
    options = {"batch_tokens": 25_000, "max_tokens_per_device": None}
    # One rank: the target row holds the batch, the source row its share of the mean and 5 % more.
    one = row_shape((18.0, 20.0), 257, world_size=1, **options)
    assert (one.source_tokens, one.target_tokens) == (128 * ceil((25_000 * 0.9 * 1.05 + 16) / 128), 25_088)
    eight = row_shape((20.0, 20.0), 257, world_size=8, **options)
    assert eight.source_tokens == eight.target_tokens == 128 * ceil((25_000 / 8 * 1.05 + 16) / 128) == 3_328
    # Never shorter than the longest sentence.
    assert row_shape((20.0, 20.0), 257, world_size=400, **options).source_tokens == 384
    assert (one.per_rank, eight.per_rank) == (1, 1)
    # 1.25 times the mean of 3,328 / 20 sentences plus 16, and a sentence for each 257 tokens of padding.
    assert 208 + 16 < eight.sentences <= 208 + 16 + 3_328 // 257 + 4


def test_micro_batches_fit_the_device() -> None:
    source, target = lengths()
    limit = 2_000
    row = shape(source, target, world_size=2, max_tokens_per_device=limit)
    assert max(row.source_tokens, row.target_tokens) <= 128 * ceil((limit + MIN_PADDING_TOKENS) / 128) == 2048
    assert row.per_rank == ceil(max(source.sum(), target.sum()) * 1.05 / 2 / (2048 - MIN_PADDING_TOKENS))
    ranks = divided(source, target, row, 2)
    assert {len(rows) for rows in ranks} == {row.per_rank}
    # The smallest limit is the longest sentence.
    longest = int(max(source.max(), target.max()))
    tokens = 128 * ceil((longest + MIN_PADDING_TOKENS) / 128)
    assert shape(source, target, max_tokens_per_device=longest).target_tokens == tokens
    with pytest.raises(ValueError, match=rf"max_tokens_per_device {longest - 1} is less than .*, {longest} tokens; "):
        shape(source, target, max_tokens_per_device=longest - 1)
    # A limit of a whole batch does not divide it.
    whole = int(max(source.sum(), target.sum()))
    assert shape(source, target, max_tokens_per_device=whole).per_rank == 1


def test_each_rank_has_a_limit_of_its_own() -> None:
    source, target = lengths()
    rows = [shape(source, target, world_size=3, max_tokens_per_device=limit) for limit in (None, 2_000, 500)]
    assert len({row.per_rank for row in rows}) == 3
    ranks = [np.concatenate(rank_rows(source, target, row, 3, rank)) for rank, row in enumerate(rows)]
    assert sorted(np.concatenate(ranks).tolist()) == list(range(len(source)))


def test_what_does_not_fit_gets_another_row() -> None:
    """Sentences of 100 tokens in rows that hold one and a half of them."""
    source = target = np.full(6, 100)
    row = RowShape(150 + MIN_PADDING_TOKENS, 150 + MIN_PADDING_TOKENS, sentences=20, longest=100, per_rank=1)
    short = np.full(6, 1)
    for sides in ((source, target), (source, short), (short, target)):
        ranks = divided(*sides, row, 2)
        assert [[len(one) for one in rows] for rows in ranks] == [[1, 1, 1], [1, 1, 1]]
    # Three sentences of 50 tokens fill a row, two of 51 leave room, on either side.
    for length, fitting in ((50, [3, 3]), (51, [2, 2, 2])):
        full = np.full(6, length)
        for sides in ((full, short), (short, full)):
            assert [len(one) for one in divided(*sides, row, 1)[0]] == fitting
    # So do more sentences than a row has room for.
    short = np.full(10, 1)
    narrow = RowShape(150 + MIN_PADDING_TOKENS, 150 + MIN_PADDING_TOKENS, sentences=8, longest=100, per_rank=1)
    assert [len(one) for one in divided(short, short, narrow, 1)[0]] == [6, 4]


@given(st.data())
def test_any_batch(data: st.DataObject) -> None:
    pairs = data.draw(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=60))
    source, target = np.array(pairs, dtype=np.uint16).T
    longest = int(max(source.max(), target.max()))
    limit = data.draw(st.none() | st.integers(longest, 300))
    world_size = data.draw(st.integers(1, 9))
    row = shape(source, target, max_tokens_per_device=limit, world_size=world_size)
    assert limit is None or max(row.source_tokens, row.target_tokens) < limit + MIN_PADDING_TOKENS + 128
    divided(source, target, row, world_size)
