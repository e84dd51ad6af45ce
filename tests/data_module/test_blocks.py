"""Blocks: no sentence crosses a border, both sides of a pair are in the same block, and blocks are full."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from data_module.batching.blocks import place_in_blocks
from tests.data_module.test_batch_plan import lengths


def check(source: np.ndarray, target: np.ndarray) -> None:
    layout = place_in_blocks(source, target)
    widths = np.concatenate([np.full(count, width) for count, width in layout.blocks])
    borders = np.concatenate([[0], np.cumsum(widths)])
    blocks = [np.searchsorted(borders, starts, "right") - 1 for starts in (layout.source_starts, layout.target_starts)]
    assert np.array_equal(*blocks)
    assert widths.tolist() == sorted(widths.tolist())
    for starts, side in ((layout.source_starts, source), (layout.target_starts, target)):
        assert (starts + side <= borders[blocks[0] + 1]).all()
        taken = np.zeros(layout.num_tokens, int)
        for start, length in zip(starts, side, strict=True):
            taken[start : start + length] += 1
        assert taken.max() == 1
    # A sentence never has a block of more than twice its length, but for the narrowest.
    longest = np.maximum(source, target)
    for block, width in enumerate(widths):
        assert width == 64 or longest[blocks[0] == block].max() > width // 2


def test_a_corpus() -> None:
    source, target = lengths()
    check(source, target)
    assert target.sum() / place_in_blocks(source, target).num_tokens > 0.95


def test_by_hand() -> None:
    """The longest first, in the fullest block that has room on both sides."""
    layout = place_in_blocks(np.array([10, 60, 4, 30]), np.array([20, 40, 30, 65]))
    # The last pair opens a block of 128. The second fits beside it. The third does not fit in targets and opens a block
    # of 64. The first fits in both, and the wide block is the fuller one.
    assert layout.blocks == [(1, 64), (1, 128)]
    assert layout.source_starts.tolist() == [64 + 90, 64 + 30, 0, 64]
    assert layout.target_starts.tolist() == [64 + 105, 64 + 65, 0, 64]


def test_no_pairs_have_one_block() -> None:
    nothing = np.array([], np.int64)
    assert place_in_blocks(nothing, nothing).blocks == [(1, 64)]


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=60))
def test_any_pairs(pairs: list[tuple[int, int]]) -> None:
    check(*np.array(pairs).T)
