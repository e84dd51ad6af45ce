"""Variants of the training text, the same bytes whoever writes them, and weights: which pairs an epoch has."""

import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from data_module.batch import SpecialIds
from data_module.batch_plan import Epoch, epoch_pairs, fewest_pairs
from data_module.corpus import variants
from data_module.corpus.preparation import prepare
from data_module.corpus.store import ParallelCorpus, TokenStore, hash_pairs, open_corpus, open_variants
from data_module.errors import InputError
from data_module.settings import BatchSettings, BpeDropout, CorpusSettings, NoiseSettings, TextSource
from data_module.stateful_loader import StatefulLoader
from data_module.tokenization.tokenizer import Tokenizer
from data_module.translation_data_module import TranslationDataModule
from tests.conftest import train_tokenizer
from tests.data_module.conftest import contents, pairs_of_text, write_pairs

DROPOUT = BpeDropout(source=0.3, target=0.3)
SPECIAL = SpecialIds(pad=0, bos=2, eos=3)
CHUNK_PAIRS = 64


@pytest.fixture(autouse=True, scope="module")
def _small_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(variants, "CHUNK_PAIRS", CHUNK_PAIRS)
        yield


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> CorpusSettings:
    return varied_corpus(tmp_path_factory.mktemp("text"), 3)


def varied_corpus(folder: Path, num_variants: int) -> CorpusSettings:
    """Prepare a corpus of 300 and, three times each, 100 pairs; return its settings."""
    train = [write_pairs(folder, "one", pairs_of_text(300, 1)), write_pairs(folder, "two", pairs_of_text(100, 2))]
    train[1] = replace(train[1], repeat=3)
    validation = write_pairs(folder, "validation", pairs_of_text(20, 3))
    made = CorpusSettings(
        str(folder / "corpus"), train, [validation], vocabulary_size=60, variants=num_variants, bpe_dropout=DROPOUT
    )
    prepare(made, progress=False)
    return made


@pytest.fixture(scope="module")
def plain(settings: CorpusSettings, tmp_path_factory: pytest.TempPathFactory) -> ParallelCorpus:
    """The training pairs without noise and dropout."""
    [corpus] = made(settings, tmp_path_factory.mktemp("plain") / "corpus", variants=1, bpe_dropout=BpeDropout())
    return corpus


@pytest.fixture
def pairs(settings: CorpusSettings) -> list[tuple[str, str]]:
    """The training text, with repetitions."""
    return [pair for source in settings.train for _ in range(source.repeat) for pair in text(source)]


def text(source: TextSource) -> list[tuple[str, str]]:
    sides = (Path(str(path)).read_text(encoding="utf-8").splitlines() for path in (source.source, source.target))
    return list(zip(*sides, strict=True))


def made(settings: CorpusSettings, folder: Path, **changes: object) -> list[ParallelCorpus]:
    """Prepare a corpus with other settings, and return its variants."""
    prepare(replace(settings, folder=str(folder), **changes), progress=False)
    return open_variants(folder)


def ids(corpus: ParallelCorpus) -> list[tuple[list[int], list[int]]]:
    return [(corpus.source[i].tolist(), corpus.target[i].tolist()) for i in range(len(corpus))]


def sides_of(corpus: ParallelCorpus) -> tuple[TokenStore, TokenStore]:
    return corpus.source, corpus.target


def decoded(corpus: ParallelCorpus) -> list[tuple[str, str]]:
    tokenizer = Tokenizer.load(corpus.source.prefix.parent / "tokenizer.model")
    return list(zip(*(tokenizer.decode(list(side)) for side in zip(*ids(corpus), strict=True)), strict=True))


def test_variants_are_the_same_text_in_other_ids(
    settings: CorpusSettings, plain: ParallelCorpus, pairs: list[tuple[str, str]]
) -> None:
    opened = open_variants(Path(settings.folder))
    seen = [ids(plain), *map(ids, opened)]
    assert len(opened) == 3
    for one in opened:
        assert decoded(one) == pairs
    for i, one in enumerate(seen):
        for other in seen[:i]:
            assert sum(new != old for new, old in zip(one, other, strict=True)) > 0.9 * len(pairs)
    # The copies of a repeated source differ too, and so do source and target of equal text.
    copies = [seen[1][300 + i * 100 : 400 + i * 100] for i in range(3)]
    assert copies[0] != copies[1] != copies[2]


def test_the_manifest_counts_each_variant(settings: CorpusSettings) -> None:
    folder = Path(settings.folder)
    manifest = prepare(settings, progress=False)
    for corpus, counts in zip(open_variants(folder), manifest["train"]["variants"], strict=True):
        assert counts["source_tokens"] == len(corpus.source.tokens)
        assert counts["target_tokens"] == len(corpus.target.tokens)
        assert counts["longest_target"] == corpus.target.lengths.max()
        assert corpus.longest == max(corpus.source.lengths.max(), corpus.target.lengths.max())
    assert manifest["train"].items() >= manifest["train"]["variants"][0].items()
    assert manifest["training_pairs"] == hash_pairs(folder, 3)
    assert not [path for path in folder.iterdir() if "text" in path.name]


def test_validation_is_plain(settings: CorpusSettings, plain: ParallelCorpus) -> None:
    varied = contents(Path(settings.folder))
    for name, content in contents(plain.source.prefix.parent).items():
        if name.startswith(("validation", "tokenizer.model")):
            assert varied[name] == content


def test_the_tokenizer_records_the_pieces_of_all_variants(settings: CorpusSettings, plain: ParallelCorpus) -> None:
    for corpora in ([plain], open_variants(Path(settings.folder))):
        tokenizer = Tokenizer.load(corpora[0].source.prefix.parent / "tokenizer.model")
        for is_target in (False, True):
            stores = [corpus.target if is_target else corpus.source for corpus in corpora]
            found = set(np.concatenate([store.tokens for store in stores]).tolist())
            special = {tokenizer.pad_id, tokenizer.unk_id, tokenizer.bos_id, tokenizer.eos_id}
            never = set(range(tokenizer.vocabulary_size)) - found - special
            assert tokenizer.never_seen(is_target) == never | {tokenizer.unk_id}


def test_dropout_of_one_side(settings: CorpusSettings, plain: ParallelCorpus, tmp_path: Path) -> None:
    [source] = made(settings, tmp_path / "source", variants=1, bpe_dropout=BpeDropout(source=0.3))
    assert source.target.tokens.tolist() == plain.target.tokens.tolist()
    assert len(source.source.tokens) > len(plain.source.tokens)
    [target] = made(settings, tmp_path / "target", variants=1, bpe_dropout=BpeDropout(target=0.3))
    assert target.source.tokens.tolist() == plain.source.tokens.tolist()
    assert len(target.target.tokens) > len(plain.target.tokens)


def test_noise_changes_the_chosen_pairs(settings: CorpusSettings, pairs: list[tuple[str, str]], tmp_path: Path) -> None:
    noise = NoiseSettings(lower_case=0.5)
    first, second = made(settings, tmp_path / "noisy", variants=2, bpe_dropout=BpeDropout(), noise=noise)
    for seen in map(decoded, (first, second)):
        capitals = lowered = 0
        for found, pair in zip(seen, pairs, strict=True):
            lower = (pair[0].lower(), pair[1].lower())
            assert found in (pair, lower)
            capitals += lower != pair
            lowered += found == lower != pair
        assert 0.4 * capitals < lowered < 0.6 * capitals
    assert decoded(first) != decoded(second)


def test_long_pairs_keep_their_plain_ids(settings: CorpusSettings, plain: ParallelCorpus, tmp_path: Path) -> None:
    before = ids(plain)
    noise = NoiseSettings(number=0.3)
    unlimited = made(settings, tmp_path / "unlimited", noise=noise)
    limited = made(settings, tmp_path / "limited", noise=noise, max_tokens=plain.longest)
    for free, other in zip(map(ids, unlimited), map(ids, limited), strict=True):
        too_long = [i for i, pair in enumerate(free) if max(map(len, pair)) > plain.longest]
        assert too_long
        assert all(other[i] == (before[i] if i in too_long else free[i]) for i in range(len(before)))


def test_symbols_stay_whole(settings: CorpusSettings, tmp_path: Path) -> None:
    """Those of a tokenizer that comes with a model too, which the recipe need not name."""
    tagged = [(f"{source} Tag<b>", f"{target} Tag<b>") for source, target in pairs_of_text(100, 5)]
    train = [write_pairs(tmp_path, "tagged", tagged)]
    lines = [line for pair in tagged for line in pair]
    tokenizer = train_tokenizer([*lines, *map(str.upper, lines)], 70, user_symbols=["Tag<b>"])
    noise = NoiseSettings(upper_case=1.0, no_final_punctuation=1.0)
    given = replace(
        settings, folder=str(tmp_path / "tags"), train=train, noise=noise, variants=1, bpe_dropout=BpeDropout(0.5, 0.5)
    )
    prepare(given, tokenizer, progress=False)
    for side in zip(*decoded(open_corpus(tmp_path / "tags", "train")), strict=True):
        assert all(sentence.endswith(" Tag<b>") and sentence[:-7].isupper() for sentence in side)


def noisy(settings: CorpusSettings, folder: Path) -> CorpusSettings:
    return replace(settings, folder=str(folder), noise=NoiseSettings(typos=0.3, web_address=0.1))


@pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker")
def test_any_number_of_processes_write_the_same_bytes(
    settings: CorpusSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And chunks of any size in which the text is read."""
    written = []
    for number in (1, 2, 3):
        monkeypatch.setattr("data_module.corpus.readers.CHUNK_BYTES", 200 if number == 3 else 2**20)
        monkeypatch.setattr(variants, "num_processors", lambda number=number: number)
        prepare(noisy(settings, tmp_path / str(number)), progress=False)
        written.append(contents(tmp_path / str(number)))
    assert written[0] == written[1] == written[2]


def test_another_seed_draws_other_numbers(settings: CorpusSettings, tmp_path: Path) -> None:
    first, other = Path(settings.folder), tmp_path / "other"
    made(settings, other, seed=2)
    assert contents(first)["tokenizer.model"] == contents(other)["tokenizer.model"]
    for one, two in zip(open_variants(first), open_variants(other), strict=True):
        assert ids(one) != ids(two)


def test_a_killed_process_is_one_line(
    settings: CorpusSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main, encode = os.getpid(), variants._ChunkEncoder.__getitem__

    def be_killed(encoder: variants._ChunkEncoder, item: int) -> object:
        if item == 5 and os.getpid() != main:
            os.kill(os.getpid(), signal.SIGKILL)
        return encode(encoder, item)

    monkeypatch.setattr(variants._ChunkEncoder, "__getitem__", be_killed)
    with pytest.raises(InputError, match=r"corpus\.variants: a process that encodes text was killed, .* memory"):
        made(settings, tmp_path / "corpus")
    assert not list(tmp_path.glob("*corpus*/*"))


def module(settings: CorpusSettings, workers: int = 0, **changes: object) -> TranslationDataModule:
    batches = BatchSettings(batch_tokens=400, workers=workers)
    given = replace(settings, **changes)
    return TranslationDataModule(Path(settings.folder), batches, SPECIAL, seed=1, corpus_settings=given)


def batches(settings: CorpusSettings, rank: int, world_size: int, workers: int = 0) -> StatefulLoader:
    data = module(settings, workers)
    data._rank_and_size = lambda: (rank, world_size)  # type: ignore[method-assign]
    return data.train_dataloader()


def test_a_corpus_that_is_replaced_or_removed_leaves_a_running_training_alone(
    settings: CorpusSettings, tmp_path: Path
) -> None:
    """Also the variants that it has not come to."""
    copy = replace(settings, folder=str(tmp_path / "corpus"))
    shutil.copytree(settings.folder, copy.folder)
    data = module(copy)
    shutil.rmtree(copy.folder)
    for variant, kept in zip(data.train_variants, open_variants(Path(settings.folder)), strict=True):
        assert variant.source[3].tolist() == kept.source[3].tolist()
        assert variant.target[3].tolist() == kept.target[3].tolist()


def order_of(epoch: Epoch) -> np.ndarray:
    """Return the pairs of an epoch's batches in order."""
    return np.concatenate([epoch.plan[i] for i in range(len(epoch.plan))])


def test_epochs_take_variants_in_turn(settings: CorpusSettings) -> None:
    data, opened = module(settings), open_variants(Path(settings.folder))
    orders = []
    for number in range(5):
        epoch = data.epochs().get(number)
        corpus, plan = epoch
        assert corpus.source.prefix == opened[number % 3].source.prefix
        orders.append(order_of(epoch))
        tokens = sum(int(corpus.target.lengths[plan[i]].sum()) + len(plan[i]) for i in range(len(plan)))
        assert tokens == sum(plan.target_tokens(i) for i in range(len(plan)))
        assert sorted(orders[-1]) == list(range(len(corpus)))
    assert not np.array_equal(orders[0], orders[3])


def test_lengths_are_those_of_all_variants(settings: CorpusSettings) -> None:
    data, opened = module(settings), open_variants(Path(settings.folder))
    assert data.longest == 1 + max(one.longest for one in opened)
    tokens = [np.mean([len(side.tokens) for side in sides]) for sides in zip(*map(sides_of, opened), strict=True)]
    assert data._mean_lengths == pytest.approx([1 + one / 600 for one in tokens])


def test_resumed_within_and_across_epochs(settings: CorpusSettings) -> None:
    """With worker processes, and on another number of ranks."""
    total = 160
    expected = list(islice(batches(settings, 0, 1), total))
    assert {batch.epoch for batch in expected} >= {0, 1, 2, 3}
    end = next(batch.num_batches for batch in expected)
    for stop in (end, 75):
        first = batches(settings, 0, 2, workers=1)
        list(islice(first, stop))
        resumed = batches(settings, 0, 1, workers=1)
        resumed.load_state_dict(first.state_dict())
        for batch, other in zip(islice(resumed, total - stop), expected[stop:], strict=True):
            assert batch.pairs.tolist() == other.pairs.tolist()
            assert torch.equal(batch.flat, other.flat)


def weighted(settings: CorpusSettings, first: float, second: float) -> CorpusSettings:
    return replace(
        settings, train=[replace(settings.train[0], weight=first), replace(settings.train[1], weight=second)]
    )


@pytest.mark.parametrize(("weights", "copies"), [((2.0, 1.0), (2, 1)), ((2.5, 0.25), (2, 0)), ((0.5, 3.0), (0, 3))])
def test_an_epoch_has_copies_by_weight(weights: tuple[float, float], copies: tuple[int, int]) -> None:
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


def test_each_source_seed_and_epoch_has_a_sample_of_its_own() -> None:
    """Sources of equal size too, and where seed, epoch and source exchange their numbers."""
    samples = set()
    for seed, epoch in ((0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (1, 2), (2, 1)):
        pairs = epoch_pairs((60, 60, 60), (0.5, 0.5, 0.5), seed=seed, epoch=epoch)
        assert pairs is not None
        samples |= {tuple(pairs[pairs // 60 == source] % 60) for source in range(3)}
    assert {len(sample) for sample in samples} == {30}
    assert len(samples) == 7 * 3


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


def test_mean_lengths_are_those_of_an_epoch_by_weight(settings: CorpusSettings) -> None:
    data = module(weighted(settings, 0.1, 9))
    epochs = [data.epochs().get(number) for number in (0, 1)]
    for side, mean in zip(("source", "target"), data._mean_lengths, strict=True):
        lengths = np.concatenate([getattr(one.corpus, side).lengths[order_of(one)] for one in epochs])
        assert mean == pytest.approx(1 + lengths.mean(), rel=0.01)


def test_equal_weights_change_nothing() -> None:
    assert epoch_pairs((3, 4), (1.0, 1.0), seed=1, epoch=0) is None
    assert epoch_pairs((), (), seed=1, epoch=0) is None


def test_each_epoch_has_sources_by_weight(settings: CorpusSettings) -> None:
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
