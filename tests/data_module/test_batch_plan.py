"""Epoch plans: every pair once, sizes within limits, batches full, ranks balanced."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_module.batching.batch_plan import (
    MAX_IMBALANCE,
    MIN_FILL,
    MIN_SLICE,
    LengthBucket,
    plan_epoch,
    plan_in_order,
    rank_batch,
)

BATCH, BUCKET = 2000, 250


def lengths(seed: int = 0, pairs: int = 3000) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    source = np.clip(random.gamma(3.0, 6.0, pairs), 1, 120).astype(np.uint16)
    target = np.clip(source * random.normal(1.1, 0.2, pairs), 1, 120).astype(np.uint16)
    return source, target


def plan(seed: int = 1, epoch: int = 0) -> list[list[LengthBucket]]:
    built = plan_epoch(*lengths(), batch_tokens=BATCH, group_tokens=BUCKET, seed=seed, epoch=epoch)
    return [built[i] for i in range(len(built))]


def test_every_pair_exactly_once_per_epoch() -> None:
    seen = np.concatenate([bucket.pairs for batch in plan() for bucket in batch])
    assert sorted(seen.tolist()) == list(range(3000))


def test_limits_hold_on_both_sides() -> None:
    source, target = lengths()
    for batch in plan():
        for bucket in batch:
            assert source[bucket.pairs].max() <= bucket.source_length
            assert target[bucket.pairs].max() <= bucket.target_length
            assert len(bucket.pairs) * max(bucket.source_length, bucket.target_length) <= BUCKET
        assert sum(len(g.pairs) * g.source_length for g in batch) <= BATCH
        assert sum(len(g.pairs) * g.target_length for g in batch) <= BATCH


def test_batches_except_the_last_are_full() -> None:
    for batch in plan()[:-1]:
        sides = [sum(len(g.pairs) * getattr(g, side) for g in batch) for side in ("source_length", "target_length")]
        assert max(sides) >= MIN_FILL * BATCH


def test_buckets_have_similar_source_lengths_and_little_padding() -> None:
    source, target = lengths()
    buckets = [bucket for batch in plan() for bucket in batch]
    one_length = [len(np.unique(source[bucket.pairs])) == 1 for bucket in buckets]
    assert np.mean(one_length) > 0.8  # in a real corpus of more than 3,000 pairs, nearly all
    padded = sum(bucket.padded_tokens() for bucket in buckets)
    assert (source.sum() + target.sum()) / padded > 0.95
    for bucket in buckets:
        assert source[bucket.pairs].max() * 10 <= source[bucket.pairs].min() * 11 + 10


def test_a_function_of_seed_and_epoch() -> None:
    def as_lists(batches: list[list[LengthBucket]]) -> list[list[list[int]]]:
        return [[bucket.pairs.tolist() for bucket in batch] for batch in batches]

    assert as_lists(plan()) == as_lists(plan())
    assert as_lists(plan()) != as_lists(plan(epoch=1))
    assert as_lists(plan()) != as_lists(plan(seed=2))
    assert as_lists(plan(seed=2, epoch=0)) != as_lists(plan(seed=1, epoch=1))
    assert as_lists(plan(seed=2, epoch=1)) != as_lists(plan(seed=1, epoch=2))


def test_buckets_differ_between_epochs() -> None:
    def neighbours(batches: list[list[LengthBucket]]) -> dict[int, frozenset[int]]:
        return {pair: frozenset(g.pairs.tolist()) for batch in batches for g in batch for pair in g.pairs.tolist()}

    first, second = neighbours(plan()), neighbours(plan(epoch=1))
    common = np.flatnonzero(lengths()[0] <= 20).tolist()  # few sentences are as long as a long one
    assert np.mean([first[pair] == second[pair] for pair in common]) < 0.2


def test_batches_are_in_random_order() -> None:
    means = np.array([np.mean([g.source_length for g in batch]) for batch in plan()])
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.3


def test_the_order_of_lengths_differs_between_epochs() -> None:
    first, second = ([g.source_length for batch in plan(epoch=epoch) for g in batch] for epoch in (0, 1))
    assert np.mean([a == b for a, b in zip(first, second, strict=False)]) < 0.3


def test_a_bucket_is_split_only_to_fill_a_batch() -> None:
    """A batch that has reached MIN_FILL is closed before a bucket that does not fit."""
    batches = plan()
    splits = 0
    for batch, following in pairwise(batches):
        last, rest = batch[-1], following[0]
        if (last.source_length, last.target_length) == (rest.source_length, rest.target_length):
            splits += 1
            filled = [
                sum(len(g.pairs) * getattr(g, side) for g in batch[:-1]) for side in ("source_length", "target_length")
            ]
            assert max(filled) < MIN_FILL * BATCH
    assert splits


def test_a_bucket_as_large_as_the_batch() -> None:
    built = plan_epoch(*lengths(), batch_tokens=BATCH, group_tokens=BATCH, seed=1, epoch=0)
    seen = [pair for i in range(len(built)) for bucket in built[i] for pair in bucket.pairs.tolist()]
    assert sorted(seen) == list(range(3000))
    sides = [[len(g.pairs) * max(g.source_length, g.target_length) for g in built[i]] for i in range(len(built))]
    assert all(sum(side) <= BATCH * 1.5 and max(side) <= BATCH for side in sides)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8, 9, 11, 13, 16, 40, 100])
def test_ranks_divide_a_batch(world_size: int) -> None:
    batch = plan()[0]
    ranks = [rank_batch(batch, rank, world_size, BUCKET) for rank in range(world_size)]
    assigned = sorted(pair for own in ranks for bucket in own for pair in bucket.pairs.tolist())
    assert assigned == sorted(pair for bucket in batch for pair in bucket.pairs.tolist())
    costs = [sum(bucket.padded_tokens() for bucket in own) for own in ranks]
    assert max(costs) <= MAX_IMBALANCE * sum(costs) / world_size + max(g.source_length + g.target_length for g in batch)
    # Each micro-batch has a fixed cost on a GPU, so there are no more of them than needed.
    assert sum(map(len, ranks)) <= len(batch) + 1.5 * world_size


def test_buckets_are_not_split_if_whole_ones_balance() -> None:
    """Assigning the most expensive bucket first to the rank with the lowest cost gives both ranks the same cost."""
    batch = [LengthBucket(np.arange(count) + 100 * count, 5, 5) for count in (10, 20, 60, 70)]
    ranks = [rank_batch(batch, rank, 2, 350) for rank in range(2)]
    assert [sorted(len(bucket.pairs) for bucket in own) for own in ranks] == [[10, 70], [20, 60]]


@pytest.mark.parametrize("world_size", [6, 7, 14])
def test_no_slice_is_too_small(world_size: int) -> None:
    batch = plan_epoch(*lengths(), batch_tokens=20_000, group_tokens=2_500, seed=1, epoch=0)[0]
    pieces = [piece for rank in range(world_size) for piece in rank_batch(batch, rank, world_size, 2_500)]
    assert len(pieces) > len(batch)
    mean = sum(bucket.padded_tokens() for bucket in batch) / world_size
    for piece in pieces:
        one_pair = piece.source_length + piece.target_length
        assert piece.padded_tokens() >= MIN_SLICE * mean - one_pair


def test_more_ranks_than_pairs() -> None:
    batch = [LengthBucket(np.array([4, 7]), 5, 6)]
    ranks = [rank_batch(batch, rank, 3, 100) for rank in range(3)]
    assert sorted(len(own) for own in ranks) == [0, 1, 1]


def test_micro_batches_fit_the_device() -> None:
    batch = plan()[0]
    for bucket in rank_batch(batch, 0, 1, 130):
        assert len(bucket.pairs) * max(bucket.source_length, bucket.target_length) <= 130


def test_validation_order_is_fixed_and_longest_first() -> None:
    buckets = plan_in_order(*lengths(), BUCKET)
    again = plan_in_order(*lengths(), BUCKET)
    assert [g.pairs.tolist() for g in buckets] == [g.pairs.tolist() for g in again]
    assert sorted(pair for g in buckets for pair in g.pairs.tolist()) == list(range(3000))
    assert [g.source_length for g in buckets] == sorted((g.source_length for g in buckets), reverse=True)
    # A validation sentence may be longer than a bucket of training text allows.
    for pair in ([5], [300]), ([300], [5]):
        [bucket] = plan_in_order(*map(np.array, pair), BUCKET)
        assert bucket.pairs.tolist() == [0]


@pytest.mark.parametrize(
    ("source", "group_tokens", "sizes"),
    [
        ([20, 23], 1000, [2]),
        ([20, 24], 1000, [1, 1]),
        ([9, 10], 1000, [2]),
        ([9, 11], 1000, [1, 1]),
        ([20, 20, 21, 21, 22, 22], 132, [6]),  # 6 of 22 are exactly 132
        ([20, 20, 21, 21, 22, 22], 131, [5, 1]),
    ],
)
def test_remaining_pairs_of_similar_lengths_share_a_bucket(
    source: list[int], group_tokens: int, sizes: list[int]
) -> None:
    """Lengths may differ by a tenth plus one, within the bucket's size."""
    buckets = plan_in_order(np.array(source, np.uint16), np.full(len(source), 5, np.uint16), group_tokens)
    assert [len(bucket.pairs) for bucket in buckets] == sizes


def test_padded_tokens_of_a_bucket() -> None:
    assert LengthBucket(np.array([4, 7, 9]), 5, 6).padded_tokens() == 33


def test_a_sentence_that_is_too_long_for_a_bucket() -> None:
    options = {"batch_tokens": BATCH, "group_tokens": BUCKET, "seed": 1, "epoch": 0}
    for source, target in (([300], [5]), ([5], [300]), ([BUCKET + 1], [1])):
        with pytest.raises(ValueError, match=f"must be at least {max(source + target)}, the"):
            plan_epoch(np.array(source), np.array(target), **options)
    assert len(plan_epoch(np.array([BUCKET]), np.array([BUCKET]), **options)) == 1


def test_no_pairs() -> None:
    none = np.array([], dtype=np.uint16)
    with pytest.raises(ValueError, match="no pairs"):
        plan_epoch(none, none, batch_tokens=BATCH, group_tokens=BUCKET, seed=1, epoch=0)


@given(st.data())
def test_any_corpus_and_settings(data: st.DataObject) -> None:
    """Every pair once, sizes within limits, for any number of ranks."""
    pairs = data.draw(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=40))
    source, target = np.array(pairs, dtype=np.uint16).T
    longest = int(max(source.max(), target.max()))
    group_tokens = data.draw(st.integers(longest, 200))
    batch_tokens = data.draw(st.integers(group_tokens, 1000))
    seed, epoch = data.draw(st.integers(0, 2**32)), data.draw(st.integers(0, 1000))
    built = plan_epoch(source, target, batch_tokens=batch_tokens, group_tokens=group_tokens, seed=seed, epoch=epoch)
    batches = [built[i] for i in range(len(built))]
    assert sorted(pair for b in batches for g in b for pair in g.pairs.tolist()) == list(range(len(pairs)))
    world_size, max_tokens = data.draw(st.integers(1, 9)), data.draw(st.integers(longest, 300))
    for index, batch in enumerate(batches):
        for bucket in batch:
            assert_bucket_fits(bucket, source, target, group_tokens)
        for side in ("source_length", "target_length"):
            assert sum(len(bucket.pairs) * getattr(bucket, side) for bucket in batch) <= batch_tokens
        members = sorted(pair for bucket in batch for pair in bucket.pairs.tolist())
        assert built.target_tokens(index) == sum(pairs[pair][1] for pair in members)
        ranks = [rank_batch(batch, rank, world_size, max_tokens) for rank in range(world_size)]
        assert sorted(pair for own in ranks for bucket in own for pair in bucket.pairs.tolist()) == members
        for own in ranks:
            for bucket in own:
                assert_bucket_fits(bucket, source, target, max_tokens)
    buckets = plan_in_order(source, target, max_tokens)
    assert sorted(pair for bucket in buckets for pair in bucket.pairs.tolist()) == list(range(len(pairs)))
    for bucket in buckets:
        assert_bucket_fits(bucket, source, target, max_tokens)


def assert_bucket_fits(bucket: LengthBucket, source: np.ndarray, target: np.ndarray, tokens: int) -> None:
    assert 0 < source[bucket.pairs].max() <= bucket.source_length
    assert 0 < target[bucket.pairs].max() <= bucket.target_length
    assert len(bucket.pairs) * max(bucket.source_length, bucket.target_length) <= tokens
