"""Views of epochs: the same text in other token ids, the same bytes from every process, and sources by weight."""

import hashlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from data_module.batching.batch import SpecialIds
from data_module.batching.epoch_cache import shared_folder
from data_module.batching.stateful_loader import StatefulLoader
from data_module.corpus.kept_text import KeptText
from data_module.corpus.preparation import prepare
from data_module.corpus.store import ParallelCorpus, open_corpus
from data_module.corpus.weights import epoch_pairs, fewest_pairs
from data_module.errors import InputError
from data_module.settings import BatchSettings, BpeDropout, CorpusSettings, NoiseSettings, TextSource
from data_module.tokenization.tokenizer import Tokenizer
from data_module.translation_data_module import TranslationDataModule, view_maker
from tests.conftest import ROOT
from tests.data_module.test_preparation import pairs_of_text, write_pairs

FORK = multiprocessing.get_context("fork")
DROPOUT = BpeDropout(source=0.3, target=0.3)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> CorpusSettings:
    """Settings of a corpus of 300 and, three times each, 100 pairs, which has its text."""
    folder = tmp_path_factory.mktemp("text")
    train = [write_pairs(folder, "one", pairs_of_text(300, 1)), write_pairs(folder, "two", pairs_of_text(100, 2))]
    train[1] = replace(train[1], repeat=3)
    validation = write_pairs(folder, "validation", pairs_of_text(20, 3))
    made = CorpusSettings(str(folder / "corpus"), train, [validation], vocabulary_size=60, bpe_dropout=DROPOUT)
    prepare(made, progress=False)
    return made


def text(source: TextSource) -> list[tuple[str, str]]:
    sides = (Path(str(path)).read_text(encoding="utf-8").splitlines() for path in (source.source, source.target))
    return list(zip(*sides, strict=True))


@pytest.fixture
def pairs(settings: CorpusSettings) -> list[tuple[str, str]]:
    """The training text, with repetitions."""
    return [pair for source in settings.train for _ in range(source.repeat) for pair in text(source)]


def view(settings: CorpusSettings, folder: Path, epoch: int = 0, seed: int = 1) -> ParallelCorpus:
    """Return a view of the corpus, written to a new folder."""
    corpus = Path(settings.folder)
    maker = view_maker(open_corpus(corpus, "train"), corpus, settings, seed)
    assert maker is not None
    out = folder / f"{maker.identity[:8]}-{epoch}"
    out.mkdir()
    maker.write(epoch, out)
    return maker.open(epoch, out)


def ids(corpus: ParallelCorpus) -> list[tuple[list[int], list[int]]]:
    return [(corpus.source[i].tolist(), corpus.target[i].tolist()) for i in range(len(corpus))]


def decoded(settings: CorpusSettings, corpus: ParallelCorpus) -> list[tuple[str, str]]:
    tokenizer = Tokenizer.load(Path(settings.folder) / "tokenizer.model")
    return list(zip(*(tokenizer.decode(list(side)) for side in zip(*ids(corpus), strict=True)), strict=True))


def digest(folder: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.npy")):
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()


def test_the_corpus_keeps_its_text(settings: CorpusSettings, pairs: list[tuple[str, str]]) -> None:
    kept = KeptText(Path(settings.folder))
    everything = np.arange(len(pairs))
    assert kept.sentences(kept.source, everything) == [source for source, _ in pairs]
    assert kept.sentences(kept.target, everything[::-7]) == [target for _, target in pairs][::-7]
    words = {word for pair in pairs for side in pair for word in side.split(" ")}
    assert kept.num_words == len(words)
    assert set(kept.words(0, kept.num_words)) == words


def test_a_corpus_without_views_has_no_text(settings: CorpusSettings, tmp_path: Path) -> None:
    plain = replace(settings, folder=str(tmp_path / "plain"), bpe_dropout=BpeDropout())
    prepare(plain, progress=False)
    assert not KeptText.is_in(tmp_path / "plain")
    for asked in (replace(plain, bpe_dropout=DROPOUT), replace(plain, noise=NoiseSettings(typos=0.1))):
        with pytest.raises(InputError, match=r"plain: was prepared without its text, which .* `prepare --force`"):
            prepare(asked, progress=False)
    # The other way round, the text is not used.
    prepare(replace(settings, bpe_dropout=BpeDropout()), progress=False)


def test_dropout_changes_ids_and_not_the_text(
    settings: CorpusSettings, pairs: list[tuple[str, str]], tmp_path: Path
) -> None:
    views = [view(settings, tmp_path, epoch) for epoch in range(3)]
    plain = ids(open_corpus(Path(settings.folder), "train"))
    for one in views:
        assert decoded(settings, one) == pairs
        changed = sum(new[0] != old[0] for new, old in zip(ids(one), plain, strict=True))
        assert changed > 0.9 * len(pairs)
    assert ids(views[0]) != ids(views[1])
    # The three copies of a repeated source differ too.
    copies = [ids(views[0])[300 + i * 100 : 400 + i * 100] for i in range(3)]
    assert copies[0] != copies[1] != copies[2]


def test_dropout_of_one_side(settings: CorpusSettings, tmp_path: Path) -> None:
    plain = open_corpus(Path(settings.folder), "train")
    only_source = view(replace(settings, bpe_dropout=BpeDropout(source=0.3)), tmp_path)
    assert [target for _, target in ids(only_source)] == [target for _, target in ids(plain)]
    assert len(only_source.source.tokens) > len(plain.source.tokens)
    only_target = view(replace(settings, bpe_dropout=BpeDropout(target=0.3)), tmp_path)
    assert [source for source, _ in ids(only_target)] == [source for source, _ in ids(plain)]
    assert len(only_target.target.tokens) > len(plain.target.tokens)


def test_noise_changes_the_chosen_pairs(settings: CorpusSettings, pairs: list[tuple[str, str]], tmp_path: Path) -> None:
    lower_cased = view(replace(settings, bpe_dropout=BpeDropout(), noise=NoiseSettings(lower_case=0.5)), tmp_path)
    capitals = lowered = 0
    for seen, pair in zip(decoded(settings, lower_cased), pairs, strict=True):
        lower = (pair[0].lower(), pair[1].lower())
        assert seen in (pair, lower)
        capitals += lower != pair
        lowered += seen == lower != pair
    assert 0.4 * capitals < lowered < 0.6 * capitals


def test_long_pairs_keep_their_plain_ids(settings: CorpusSettings, tmp_path: Path) -> None:
    plain = open_corpus(Path(settings.folder), "train")
    limited = replace(settings, max_tokens=plain.longest)
    seen, before = ids(view(limited, tmp_path)), ids(plain)
    unlimited = ids(view(replace(settings, max_tokens=1000), tmp_path))
    too_long = [i for i, pair in enumerate(unlimited) if max(map(len, pair)) > plain.longest]
    assert too_long
    assert all(seen[i] == before[i] for i in too_long)
    assert all(seen[i] == unlimited[i] for i in range(len(seen)) if i not in too_long)


@pytest.mark.parametrize("seed", [1, 2])
def test_every_process_writes_the_same_bytes(settings: CorpusSettings, tmp_path: Path, seed: int) -> None:
    noisy = replace(settings, noise=NoiseSettings(typos=0.3, web_address=0.1))
    folders = [tmp_path / name for name in ("here", "there")]
    for folder in folders:
        folder.mkdir()
    view(noisy, folders[0], 2, seed)
    process = FORK.Process(target=view, args=(noisy, folders[1], 2, seed))
    process.start()
    process.join()
    assert digest(folders[0]) == digest(folders[1])
    (tmp_path / "later").mkdir()
    view(noisy, tmp_path / "later", 3, seed)
    assert digest(tmp_path / "later") != digest(folders[0])


@pytest.mark.slow
def test_the_identity_is_the_same_in_every_interpreter(settings: CorpusSettings) -> None:
    """Otherwise each rank would write views of its own."""
    code = (
        "import sys; from data_module.settings import *; from data_module.corpus.store import open_corpus\n"
        "from data_module.translation_data_module import view_maker\n"
        f"settings = CorpusSettings(folder={settings.folder!r}, train=[], validation=[], "
        "bpe_dropout=BpeDropout(source=0.1), user_symbols=['<a>', '<b>', '<c>', '<d>'])\n"
        f"folder = __import__('pathlib').Path({settings.folder!r})\n"
        "print(view_maker(open_corpus(folder, 'train'), folder, settings, 1).identity)"
    )
    identities = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(identities) == 1


def test_mean_lengths_are_those_of_views(settings: CorpusSettings, tmp_path: Path) -> None:
    noisy = replace(settings, noise=NoiseSettings(upper_case=0.5, number=0.5))
    corpus = Path(settings.folder)
    maker = view_maker(open_corpus(corpus, "train"), corpus, noisy, 1)
    assert maker is not None
    seen = view(noisy, tmp_path)
    expected = (len(seen.source.tokens) / len(seen), len(seen.target.tokens) / len(seen))
    # Few words have few segmentations in an epoch, so that epochs differ.
    assert maker.mean_lengths() == pytest.approx(expected, rel=0.08)
    plain = open_corpus(corpus, "train")
    assert len(plain.source.tokens) / len(plain) < 0.7 * expected[0]


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
    light = replace(settings, train=[replace(one, weight=0.001) for one in settings.train])
    for one in (light, replace(light, bpe_dropout=BpeDropout())):
        with pytest.raises(
            InputError, match=r"corpus\.train: an epoch may have no pairs with these weights; raise one"
        ):
            module(one)


@pytest.mark.parametrize("has_views", [True, False])
def test_mean_lengths_are_those_of_an_epoch_by_weight(
    settings: CorpusSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_views: bool
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    heavy = replace(settings, train=[replace(settings.train[0], weight=0.1), replace(settings.train[1], weight=9)])
    heavy = heavy if has_views else replace(heavy, bpe_dropout=BpeDropout())
    data = module(heavy)
    corpus, order = first_epoch(data)
    for side, mean in zip((corpus.source, corpus.target), data._mean_lengths, strict=True):
        assert mean == pytest.approx(1 + side.lengths[order].mean(), rel=0.08 if has_views else 0.01)


def test_equal_weights_change_nothing() -> None:
    assert epoch_pairs((3, 4), (1.0, 1.0), seed=1, epoch=0) is None
    assert epoch_pairs((), (), seed=1, epoch=0) is None


@pytest.mark.parametrize("has_views", [True, False])
def test_an_epoch_has_sources_by_weight(
    settings: CorpusSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_views: bool
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    weighted = replace(settings, train=[replace(settings.train[0], weight=0.5), replace(settings.train[1], weight=2)])
    weighted = weighted if has_views else replace(weighted, bpe_dropout=BpeDropout())
    corpus, order = first_epoch(module(weighted))
    text_of = decoded(settings, corpus)
    seen = Counter(text_of[i] for i in order.tolist())
    first, second = (text(source) for source in settings.train)
    assert sum(seen.values()) == 150 + 2 * 3 * 100
    assert sum(seen[pair] for pair in set(second)) == 600
    assert sum(seen[pair] for pair in set(first) - set(second)) == 150


def test_a_weight_has_to_be_above_zero() -> None:
    for weight in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=r"`weight` of a text source is .* it must be above 0"):
            TextSource("a", "b", weight=weight)
    with pytest.raises(ValueError, match=r"corpus\.bpe_dropout\.target 1 is not from 0 to below 1"):
        BpeDropout(target=1)


def module(settings: CorpusSettings) -> TranslationDataModule:
    batches = BatchSettings(batch_tokens=400, workers=0)
    return TranslationDataModule(
        Path(settings.folder), batches, SpecialIds(pad=0, bos=2, eos=3), seed=1, corpus_settings=settings
    )


def first_epoch(data: TranslationDataModule) -> tuple[ParallelCorpus, np.ndarray]:
    """The corpus or view of the first epoch, and the pairs of its batches in order."""
    epochs = data.epochs()
    epoch = epochs.get(0)
    epochs.discard_next()
    return epoch.corpus, np.concatenate([epoch.plan[i] for i in range(len(epoch.plan))])


def batches(settings: CorpusSettings, rank: int, world_size: int, workers: int = 0) -> StatefulLoader:
    data = module(replace(settings))
    data.settings = replace(data.settings, workers=workers)
    data._rank_and_size = lambda: (rank, world_size)  # type: ignore[method-assign]
    return data.train_dataloader()


def test_resumed_in_the_middle_of_an_epoch(
    settings: CorpusSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With worker processes, from another temporary folder, as on another node."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    whole = batches(settings, 0, 1)
    expected = list(islice(whole, 90))
    assert {batch.epoch for batch in expected} == {0, 1, 2}
    (tmp_path / "other").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "other"))
    for stop in (1, 25, 75):
        first = batches(settings, 0, 1, workers=1)
        list(islice(first, stop))
        resumed = batches(settings, 0, 1, workers=1)
        resumed.load_state_dict(first.state_dict())
        for batch, other in zip(islice(resumed, 90 - stop), expected[stop:], strict=True):
            assert batch.pairs.tolist() == other.pairs.tolist()
            assert torch.equal(batch.ids, other.ids)


def slow_write(folder: Path) -> None:
    """Write a view that is never complete."""
    (folder / "half").write_text("half a view")
    (folder.parent / "writing").touch()
    time.sleep(60)


def test_a_killed_writer_leaves_no_half_view(tmp_path: Path) -> None:
    writer = FORK.Process(target=shared_folder, args=(tmp_path, "one", slow_write))
    writer.start()
    while not (tmp_path / "writing").exists():
        time.sleep(0.01)
    os.kill(writer.pid or 0, signal.SIGKILL)
    writer.join()
    assert not list(tmp_path.glob("*.view"))
    path, lock = shared_folder(tmp_path, "one", lambda folder: (folder / "whole").touch())
    assert sorted(file.name for file in path.iterdir()) == ["lock", "whole"]
    assert not list(tmp_path.glob("partial*"))
    # A view that is in use is kept, and removed when the next one is written after its use.
    shared_folder(tmp_path, "two", lambda folder: None)
    assert path.exists()
    del lock
    shared_folder(tmp_path, "three", lambda folder: None)
    assert not path.exists()


def test_a_view_that_cannot_be_written_is_not_kept(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        shared_folder(tmp_path, "one", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["views.lock"]
