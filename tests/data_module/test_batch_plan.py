"""Epoch plans: every pair once, random batches within the limits and full."""

import doctest
import tracemalloc
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import data_module.batch
from data_module import batch_plan, rank_rows
from data_module.batch_plan import Epochs, plan_epoch
from data_module.corpus.store import open_corpus

BATCH = 2000


def lengths(seed: int = 0, pairs: int = 3000) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    source = np.clip(random.gamma(3.0, 6.0, pairs), 1, 120).astype(np.uint16)
    target = np.clip(source * random.normal(1.1, 0.2, pairs), 1, 120).astype(np.uint16)
    return source, target


def plan(seed: int = 1, epoch: int = 0) -> list[list[int]]:
    built = plan_epoch(*lengths(), batch_tokens=BATCH, seed=seed, epoch=epoch)
    return [built[i].tolist() for i in range(len(built))]


@pytest.mark.parametrize("longer_source", [False, True])
def test_a_batch_takes_pairs_until_the_next_one_does_not_fit(longer_source: bool) -> None:
    source, target = reversed(lengths()) if longer_source else lengths()
    built = plan_epoch(source, target, batch_tokens=BATCH, seed=1, epoch=0)
    batches = [built[i].tolist() for i in range(len(built))]
    for batch, following in zip(batches, [*batches[1:], [0]], strict=True):
        sums = source[batch].sum(), target[batch].sum()
        assert max(sums) <= BATCH
        if batch is not batches[-1]:
            assert max(sums[0] + source[following[0]], sums[1] + target[following[0]]) > BATCH


def test_only_the_pairs_that_are_named() -> None:
    pairs = np.array([7, 2, 2999, 7, 11])
    built = plan_epoch(*lengths(), batch_tokens=BATCH, seed=1, epoch=0, pairs=pairs)
    assert sorted(pair for i in range(len(built)) for pair in built[i].tolist()) == [2, 7, 7, 11, 2999]


def test_pairs_that_are_far_shorter_than_the_mean_of_the_corpus() -> None:
    lengths = np.full(1100, 2000, dtype=np.uint16)
    lengths[:100] = 1
    pairs = np.arange(10_000) % 100
    built = plan_epoch(lengths, lengths, batch_tokens=BATCH, seed=1, epoch=0, pairs=pairs)
    assert [built[i].size for i in range(len(built))] == [BATCH] * 5


def test_a_function_of_seed_and_epoch() -> None:
    assert plan() == plan()
    assert plan() != plan(epoch=1)
    assert plan() != plan(seed=2)
    assert plan(seed=2, epoch=0) != plan(seed=1, epoch=1)
    assert plan(seed=2, epoch=1) != plan(seed=1, epoch=2)


def test_batches_are_random() -> None:
    """Neither the order of the corpus nor lengths decide which pairs are together."""
    source, _ = lengths()
    batches = plan()
    order = np.array([pair for batch in batches for pair in batch])
    assert abs(np.corrcoef(order, np.arange(len(order)))[0, 1]) < 0.1
    means = [source[batch].mean() for batch in batches[:-1]]
    # The standard error of a mean, not the spread of batches of like length.
    assert np.std(means) < 2 * source.std() / np.sqrt(len(batches[0]))
    first, second = ({pair: index for index, batch in enumerate(plan(epoch=e)) for pair in batch} for e in (0, 1))
    assert np.mean([first[pair] == second[pair] for pair in range(3000)]) < 0.1


def test_the_window_has_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plan()
    monkeypatch.setattr(batch_plan, "_WINDOW_BATCHES", 2.5)
    assert plan() == expected


def test_memory_is_that_of_the_plan_and_a_window() -> None:
    source, target = lengths(pairs=300_000)
    tracemalloc.start()
    try:
        built = plan_epoch(source, target, batch_tokens=BATCH, seed=1, epoch=0)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(built) > 2000
    assert kept < 6 * len(source)  # 4 bytes a pair, and a few numbers for each batch
    assert peak < 8 * len(source)  # running sums of all pairs would take 16 bytes a pair


def test_every_setting_is_used(tiny_corpus: Path) -> None:
    settings, first = {"batch_tokens": 400, "seed": 1}, set()
    weights = [{"weights": ((100, 200), of_sources)} for of_sources in ((1.0, 2.0), (2.0, 1.0))]
    changes = ({}, {"seed": 2}, {"batch_tokens": 300}, *weights)
    for change in changes:
        for epoch in (0, 1):
            epochs = Epochs([open_corpus(tiny_corpus, "train")], **{**settings, **change})
            built, again = epochs.get(epoch).plan, epochs.get(epoch).plan
            batches = [built[i].tolist() for i in range(len(built))]
            assert batches == [again[i].tolist() for i in range(len(again))]
            first.add(str(batches))
    assert len(first) == 2 * len(changes)


def test_a_sentence_that_is_longer_than_a_batch() -> None:
    for source, target in (([BATCH + 1], [5]), ([5], [BATCH + 1])):
        with pytest.raises(ValueError, match=f"a pair of {BATCH + 1} tokens does not fit"):
            plan_epoch(np.array(source), np.array(target), batch_tokens=BATCH, seed=1, epoch=0)
    assert len(plan_epoch(np.array([BATCH]), np.array([BATCH]), batch_tokens=BATCH, seed=1, epoch=0)) == 1


def test_no_pairs() -> None:
    none = np.array([], dtype=np.uint16)
    with pytest.raises(ValueError, match="no pairs"):
        plan_epoch(none, none, batch_tokens=BATCH, seed=1, epoch=0)


@given(st.data())
def test_any_corpus_and_settings(data: st.DataObject) -> None:
    pairs = data.draw(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=40))
    source, target = np.array(pairs, dtype=np.uint16).T
    batch_tokens = data.draw(st.integers(int(max(source.max(), target.max())), 1000))
    seed, epoch = data.draw(st.integers(0, 2**32)), data.draw(st.integers(0, 1000))
    built = plan_epoch(source, target, batch_tokens=batch_tokens, seed=seed, epoch=epoch)
    batches = [built[i] for i in range(len(built))]
    assert batches[0].dtype == np.uint32
    assert sorted(pair for batch in batches for pair in batch.tolist()) == list(range(len(pairs)))
    for index, batch in enumerate(batches):
        assert 0 < source[batch].sum() <= batch_tokens
        assert built.target_tokens(index) == target[batch].sum() <= batch_tokens


@pytest.mark.parametrize("module", [data_module.batch, batch_plan, rank_rows])
def test_examples_in_docstrings(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert (found.failed, found.attempted > 0) == (0, True)
