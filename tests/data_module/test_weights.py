"""Weights of training sources: which pairs an epoch has."""

import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_module.batching.batch_plan import Epoch, epoch_pairs, fewest_pairs
from data_module.errors import InputError
from data_module.settings import CorpusSettings, TextSource
from tests.data_module.test_variants import decoded, module, text, varied_corpus


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> CorpusSettings:
    return varied_corpus(tmp_path_factory.mktemp("text"), 2)


def weighted(settings: CorpusSettings, first: float, second: float) -> CorpusSettings:
    return replace(
        settings, train=[replace(settings.train[0], weight=first), replace(settings.train[1], weight=second)]
    )


@pytest.mark.parametrize(("weights", "copies"), [((2.0, 1.0), (2, 1)), ((2.5, 0.25), (2, 0)), ((0.5, 3.0), (0, 3))])
def test_weights(weights: tuple[float, float], copies: tuple[int, int]) -> None:
    sizes = (200, 400)
    first, again, later = (epoch_pairs(sizes, weights, seed=1, epoch=epoch) for epoch in (0, 0, 1))
    assert first is not None
    assert np.array_equal(first, again)
    assert list(first) == sorted(first)
    times = Counter(first.tolist())
    for start, size, weight, least in zip((0, 200), sizes, weights, copies, strict=True):
        counts = [times[pair] for pair in range(start, start + size)]
        assert sum(counts) == weight * size
        assert set(counts) <= {least, least + 1}
    if any(weight % 1 for weight in weights):
        assert not np.array_equal(first, later)


def test_a_sample_that_is_not_whole_is_right_on_average() -> None:
    sizes, weights = (3, 10, 1), (0.1, 2.3, 2.5)
    epochs = [epoch_pairs(sizes, weights, seed=1, epoch=epoch) for epoch in range(400)]
    times = np.array([np.bincount(pairs, minlength=14) for pairs in epochs if pairs is not None])
    assert set(times[:, :3].sum(1)) == {0, 1}
    assert 90 <= times[:, :3].sum() <= 150  # 0.3 of a pair an epoch
    assert set(times[:, 3:13].sum(1)) == {23}
    assert set(times[:, 13]) == {2, 3}
    assert fewest_pairs(sizes, weights) == 0 + 23 + 2
    assert min(len(pairs) for pairs in epochs if pairs is not None) == 25


def test_weights_that_leave_no_pairs_are_refused(settings: CorpusSettings) -> None:
    with pytest.raises(InputError, match=r"corpus\.train: an epoch may have no pairs with these weights; raise one"):
        module(weighted(settings, 0.001, 0.001))


def test_mean_lengths_are_those_of_an_epoch_by_weight(
    settings: CorpusSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    data = module(weighted(settings, 0.1, 9))
    epochs = [data.epochs().get(number) for number in (0, 1)]
    for side, mean in zip(("source", "target"), data._mean_lengths, strict=True):
        lengths = np.concatenate([getattr(one.corpus, side).lengths[order_of(one)] for one in epochs])
        assert mean == pytest.approx(1 + lengths.mean(), rel=0.01)


def order_of(epoch: Epoch) -> np.ndarray:
    """Return the pairs of an epoch's batches in order."""
    return np.concatenate([epoch.plan[i] for i in range(len(epoch.plan))])


def test_equal_weights_change_nothing() -> None:
    assert epoch_pairs((3, 4), (1.0, 1.0), seed=1, epoch=0) is None
    assert epoch_pairs((), (), seed=1, epoch=0) is None


def test_each_epoch_has_sources_by_weight(
    settings: CorpusSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    data, samples = module(weighted(settings, 0.5, 2)), []
    first, second = (text(source) for source in settings.train)
    for number in range(3):
        epoch = data.epochs().get(number)
        text_of, order = decoded(epoch.corpus), order_of(epoch).tolist()
        seen = Counter(text_of[i] for i in order)
        assert sum(seen.values()) == 150 + 2 * 3 * 100
        assert sum(seen[pair] for pair in set(second)) == 600
        assert sum(seen[pair] for pair in set(first) - set(second)) == 150
        samples.append({i for i in order if i < 300})
    assert samples[0] != samples[1] != samples[2]


def test_a_weight_has_to_be_above_zero() -> None:
    for weight in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=r"`weight` of a text source is .* it must be above 0"):
            TextSource("a", "b", weight=weight)
