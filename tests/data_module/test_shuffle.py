"""The shuffle is a bijection with an inverse, and depends on the generator."""

import numpy as np

from data_module.batching.shuffle import Shuffle


def shuffle(seed: int) -> Shuffle:
    return Shuffle(np.random.default_rng(seed))


def test_indices_are_recovered() -> None:
    count = 150_001  # several blocks, the last one a part
    made = shuffle(1)
    positions = made.positions(count)
    assert len(np.unique(positions)) == count
    assert np.array_equal(made.indices(np.sort(positions)), np.argsort(positions))
    assert made.positions(0).tolist() == []


def test_positions_are_spread_over_all_numbers() -> None:
    positions = shuffle(1).positions(100_000).astype(np.float64)
    counts = np.histogram(positions, bins=16, range=(0, 2**32))[0]
    assert counts.min() > 0.9 * 100_000 / 16
    assert counts.max() < 1.1 * 100_000 / 16
    assert abs(np.corrcoef(positions, np.arange(100_000))[0, 1]) < 0.02


def test_shuffles_differ_between_generators() -> None:
    assert len({shuffle(seed).positions(4).tobytes() for seed in range(2000)}) == 2000
    assert np.array_equal(shuffle(7).positions(1000), shuffle(7).positions(1000))


def test_two_shuffles_differ_by_more_than_a_key() -> None:
    """With one round, two shuffles of the same number would differ by a constant number of flipped bits."""
    indices = np.arange(1000, dtype=np.uint32)
    flipped = shuffle(1).indices(shuffle(2).positions(1000)) ^ indices
    assert len(np.unique(flipped)) == 1000
