"""Length buckets: every pair once, similar lengths, sizes within limits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_module.batching.batch import length_buckets
from tests.data_module.test_batch_plan import lengths

TOKENS = 250


def test_the_order_is_fixed_and_longest_first() -> None:
    buckets = length_buckets(*lengths(), TOKENS)
    again = length_buckets(*lengths(), TOKENS)
    assert [bucket.pairs.tolist() for bucket in buckets] == [bucket.pairs.tolist() for bucket in again]
    sources = [bucket.source_length for bucket in buckets]
    assert sources == sorted(sources, reverse=True)
    # A sentence may be longer than a bucket.
    for pair in ([5], [300]), ([300], [5]):
        [bucket] = length_buckets(*map(np.array, pair), TOKENS)
        assert bucket.pairs.tolist() == [0]


def test_little_padding() -> None:
    source, target = lengths()
    buckets = length_buckets(source, target, TOKENS)
    padded = sum(len(b.pairs) * (b.source_length + b.target_length) for b in buckets)
    assert (source.sum() + target.sum()) / padded > 0.9


@pytest.mark.parametrize(
    ("source", "tokens", "sizes"),
    [
        ([20, 23], 1000, [2]),
        ([20, 24], 1000, [1, 1]),
        ([9, 10], 1000, [2]),
        ([9, 11], 1000, [1, 1]),
        ([20, 20, 21, 21, 22, 22], 132, [6]),  # 6 of 22 are exactly 132
        ([20, 20, 21, 21, 22, 22], 131, [5, 1]),
    ],
)
def test_similar_lengths_share_a_bucket(source: list[int], tokens: int, sizes: list[int]) -> None:
    """The longest is at most 1.1 times the shortest plus one."""
    buckets = length_buckets(np.array(source, np.uint16), np.full(len(source), 5, np.uint16), tokens)
    assert [len(bucket.pairs) for bucket in buckets] == sizes


@given(st.data())
def test_any_corpus(data: st.DataObject) -> None:
    pairs = data.draw(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=40))
    source, target = np.array(pairs, dtype=np.uint16).T
    tokens = data.draw(st.integers(1, 300))
    buckets = length_buckets(source, target, tokens)
    assert sorted(pair for bucket in buckets for pair in bucket.pairs.tolist()) == list(range(len(pairs)))
    for bucket in buckets:
        assert source[bucket.pairs].max() == bucket.source_length
        assert target[bucket.pairs].max() == bucket.target_length
        assert len(bucket.pairs) == 1 or len(bucket.pairs) * max(bucket.source_length, bucket.target_length) <= tokens


def test_long_targets_of_short_sources_count() -> None:
    buckets = length_buckets(np.full(7, 1), np.full(7, 100), TOKENS)
    assert [len(bucket.pairs) for bucket in buckets] == [2, 2, 2, 1]
