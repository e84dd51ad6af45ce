"""Prefixes and names of text sources, and the manifest's record of them."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from data_module.batch import SpecialIds
from data_module.corpus.manifest import source_names
from data_module.corpus.store import open_corpus
from data_module.errors import InputError
from data_module.settings import BatchSettings, CorpusSettings, TextSource
from data_module.translation_data_module import TranslationDataModule
from tests.data_module.conftest import dropped, made, pairs_of_text, text_of, write_pairs

# Of the text's letters, and none of its words.
DE, FR = "bede", "lelu"


@pytest.fixture
def settings(tmp_path: Path) -> CorpusSettings:
    """300 and 200 training pairs, 20 and 10 validation pairs, of two prefixes."""
    train = [
        replace(write_pairs(tmp_path, f"train_{prefix}", pairs_of_text(count, seed)), prefix=prefix)
        for prefix, count, seed in ((DE, 300, 1), (FR, 200, 2))
    ]
    validation = [
        replace(write_pairs(tmp_path, f"validation_{prefix}", pairs_of_text(count, seed)), prefix=prefix)
        for prefix, count, seed in ((DE, 20, 3), (FR, 10, 4))
    ]
    return CorpusSettings(str(tmp_path / "corpus"), train, validation, vocabulary_size=60, user_symbols=[DE, FR])


def with_prefix(prefix: str, pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(f"{prefix} {source}", target) for source, target in pairs]


def test_each_source_sentence_begins_with_the_prefix_of_its_source(settings: CorpusSettings) -> None:
    manifest = made(settings)
    assert text_of(settings) == [*with_prefix(DE, pairs_of_text(300, 1)), *with_prefix(FR, pairs_of_text(200, 2))]
    validation = [*with_prefix(DE, pairs_of_text(20, 3)), *with_prefix(FR, pairs_of_text(10, 4))]
    assert text_of(settings, "validation") == validation
    lines = (Path(settings.folder) / "validation.source.txt").read_text(encoding="utf-8").split("\n")
    assert lines == [*(source for source, _ in validation), ""]
    assert manifest["train"]["sources"] == [
        {"name": DE, "pairs": 300, "repeat": 1},
        {"name": FR, "pairs": 200, "repeat": 1},
    ]
    assert [one["pairs"] for one in manifest["validation"]["sources"]] == [20, 10]


def test_the_record_counts_kept_pairs_of_one_copy(settings: CorpusSettings, tmp_path: Path) -> None:
    """The first source has an empty pair, one of its pairs twice, and occurs three times in the corpus."""
    pairs = [*pairs_of_text(50, 5), ("", "the"), pairs_of_text(50, 5)[7]]
    train = [
        replace(write_pairs(tmp_path, "some", pairs), repeat=3),
        write_pairs(tmp_path, "more", pairs_of_text(9, 6)),
    ]
    validation = [replace(settings.validation[0], repeat=2), settings.validation[1]]
    changed = replace(settings, train=train, validation=validation, drop_duplicates=True)
    manifest = made(changed)
    assert manifest["train"]["sources"] == [
        {"name": "some", "pairs": 50, "repeat": 3},
        {"name": "more", "pairs": 9, "repeat": 1},
    ]
    assert [(one["pairs"], one["repeat"]) for one in manifest["validation"]["sources"]] == [(20, 2), (10, 1)]
    assert len(open_corpus(Path(settings.folder), "train")) == 50 * 3 + 9


def test_an_empty_source_sentence_stays_empty(settings: CorpusSettings, tmp_path: Path) -> None:
    text = replace(write_pairs(tmp_path, "some", [("", "the"), ("the", ""), ("a", "a")]), prefix=DE)
    manifest = made(replace(settings, train=[*settings.train, text]))
    assert dropped(manifest["train"]) == {"empty_side": 2}
    # Each is reported under the name of the file that it is in.
    empty = manifest["train"]["pairs_dropped"]["empty_side"]
    assert empty["first_lines"] == [f"{text.source}:1", f"{text.target}:2"]
    assert manifest["train"]["sources"][2] == {"name": DE, "pairs": 1, "repeat": 1}


def test_the_prefix_counts_in_max_tokens(settings: CorpusSettings) -> None:
    """The longest pair that fits without the prefix does not fit with it."""
    plain = replace(settings, train=[replace(text, prefix=None) for text in settings.train])
    longest = made(plain)["train"]["longest_source"]
    fits = made(replace(plain, max_tokens=longest), force=True)["train"]
    assert "too_long" not in dropped(fits)
    account = made(replace(settings, max_tokens=longest), force=True)["train"]
    assert dropped(account)["too_long"] > 0


def test_duplicates_and_overlap_are_compared_with_the_prefix(settings: CorpusSettings, tmp_path: Path) -> None:
    """The same ten pairs as two languages are no duplicates; validation pairs count with their own prefix only."""
    pairs = pairs_of_text(10, 7)
    text = write_pairs(tmp_path, "same", pairs)
    changed = replace(
        settings,
        train=[replace(text, prefix=DE), replace(text, prefix=FR), replace(text, prefix=FR), settings.train[0]],
        validation=[replace(write_pairs(tmp_path, "held_out", pairs[:4]), prefix=FR)],
        test=[replace(write_pairs(tmp_path, "test", pairs[4:6]), prefix=DE)],
        drop_duplicates=True,
        drop_overlap=True,
    )
    manifest = made(changed)
    account = manifest["train"]
    assert dropped(account) == {"duplicate": 6, "overlap_with_validation": 8, "overlap_with_test": 2}
    assert [one["pairs"] for one in account["sources"]] == [8, 6, 0, 300]


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_a_prefix_has_to_be_a_user_symbol(settings: CorpusSettings, split: str) -> None:
    text = replace(settings.train[0], prefix=">>it<<")
    with pytest.raises(InputError) as caught:
        made(replace(settings, **{split: [text]}))
    assert str(caught.value) == (
        f"corpus.{split}: the prefix '>>it<<' of a text source is none of corpus.user_symbols;"
        f" add it there (they are: {DE} {FR})"
    )
    with pytest.raises(InputError, match=r"the prefix '' .*they are: none"):
        made(replace(settings, train=[replace(text, prefix="")], user_symbols=[]))


def data_of(settings: CorpusSettings) -> TranslationDataModule:
    batches = BatchSettings(batch_tokens=800, workers=0)
    return TranslationDataModule(Path(settings.folder), batches, SpecialIds(pad=0, bos=2, eos=3), seed=1)


def test_a_validation_batch_is_of_one_source(settings: CorpusSettings) -> None:
    """The third source shares the first one's prefix, and so its name."""
    validation = [replace(settings.validation[0], repeat=2), settings.validation[1], settings.validation[0]]
    settings = replace(settings, validation=validation)
    made(settings)
    data = data_of(settings)
    names, of_pair = data.validation_sources() or ([], np.empty(0))
    assert names == [DE, FR]
    assert of_pair.tolist() == [0] * 40 + [1] * 10 + [0] * 20
    batches = list(data.val_dataloader())
    assert sorted(pair for batch in batches for pair in batch.pairs.tolist()) == list(range(70))
    assert {len(set(of_pair[batch.pairs.numpy()])) for batch in batches} == {1}
    lengths = [batch.source.size(1) for batch in batches]
    assert lengths == sorted(lengths, reverse=True)
    first_with = [next(i for i, batch in enumerate(batches) if of_pair[batch.pairs[0]] == source) for source in (0, 1)]
    assert min(first_with) == 0
    assert max(first_with) < len(batches) - 1  # sources are mixed, so that every rank has some of each


def rank_of(rank: int, world_size: int, device: str = "cpu", others: tuple[int, ...] = ()) -> Any:
    """Return what the data ask a Trainer for; `others` are the numbers of other ranks that it reduces."""

    def reduce(own: torch.Tensor, reduce_op: str) -> torch.Tensor:
        return getattr(torch.tensor([own, *others]), reduce_op)()

    strategy = SimpleNamespace(root_device=torch.device(device), reduce=reduce)
    return SimpleNamespace(global_rank=rank, world_size=world_size, strategy=strategy)


@pytest.mark.parametrize(("most", "expected"), [(None, [6, 1]), (20_000, [6, 1]), (60, [9, 8])])
def test_a_gpu_validates_in_large_batches(most: int | None, expected: list[int], settings: CorpusSettings) -> None:
    """Of sentences of any length, within a limit that is given. On a CPU a batch has an eighth of training's tokens."""
    made(replace(settings, validation=settings.validation[:1]))
    batches = BatchSettings(batch_tokens=800, max_tokens_per_device=most, workers=0)
    data = TranslationDataModule(Path(settings.folder), batches, SpecialIds(pad=0, bos=2, eos=3), seed=1)
    counts = []
    for device in ("cpu", "cuda"):
        data.trainer = rank_of(0, 1, device)
        loaded = list(data.val_dataloader())
        assert sorted(pair for batch in loaded for pair in batch.pairs.tolist()) == list(range(20))
        counts.append(len(loaded))
    assert counts == expected


def test_ranks_with_other_limits_divide_the_same_validation_batches(settings: CorpusSettings) -> None:
    """The limit of one is 60 tokens, and that of the other the usual 100."""
    made(settings)
    pairs, counts = [], []
    for rank, (most, other) in enumerate([(60, 100), (None, 60)]):
        batches = BatchSettings(batch_tokens=800, max_tokens_per_device=most, workers=0)
        data = TranslationDataModule(Path(settings.folder), batches, SpecialIds(pad=0, bos=2, eos=3), seed=1)
        data.trainer = rank_of(rank, 2, others=(other,))
        loaded = list(data.val_dataloader())
        pairs += [pair for batch in loaded if not batch.is_filler for pair in batch.pairs.tolist()]
        counts.append(len(loaded))
    assert sorted(pairs) == list(range(30))
    assert counts[0] == counts[1]


def test_some_sentences_are_translated(settings: CorpusSettings) -> None:
    """Of 30 pairs, four that are 7.5 apart, in batches of their own that each rank has as many of, give or take one."""
    made(settings)
    folder, batches = Path(settings.folder), BatchSettings(batch_tokens=800, workers=0)
    for count, expected in ((4, [0, 7, 15, 22]), (0, []), (99, list(range(30))), (None, list(range(30)))):
        data = TranslationDataModule(
            folder, batches, SpecialIds(pad=0, bos=2, eos=3), seed=1, validation_translations=count
        )
        assert data.translated_pairs == expected
        found: dict[bool, list[int]] = {True: [], False: []}
        per_rank = []
        for rank in range(2):
            data.trainer = rank_of(rank, 2)
            loaded = [batch for batch in data.val_dataloader() if not batch.is_filler]
            for batch in loaded:
                found[batch.is_translated] += batch.pairs.tolist()
            per_rank.append(sum(batch.is_translated for batch in loaded))
        assert sorted(found[True]) == expected
        assert sorted(found[True] + found[False]) == list(range(30))
        assert abs(per_rank[0] - per_rank[1]) <= 1


def test_one_name_has_no_scores_by_source(settings: CorpusSettings) -> None:
    plain = [replace(text, prefix=None) for text in settings.validation]
    for validation in ([plain[0]], [settings.validation[0]] * 2, [replace(text, name="all") for text in plain]):
        changed = replace(settings, validation=validation)
        made(changed, force=True)
        assert data_of(changed).validation_sources() is None
    changed = replace(settings, validation=plain)
    made(changed, force=True)
    assert data_of(changed).validation_sources() is not None


def test_names() -> None:
    texts = [
        TextSource("text/news.en.gz", "text/news.de.gz"),
        TextSource("a/news.en", "a/news.fr"),
        TextSource(tsv="b/talks v2.tsv"),
        TextSource("a.en", "a.de", prefix=">>de<<"),
        TextSource("b.en", "b.de", prefix=">>de<<"),
        TextSource("a.en", "a.fr", prefix=">>fr<<", name="é-1.2_x"),
        TextSource("de.en", "de.de"),
        TextSource("de_2.en", "de_2.de"),
        TextSource(dataset="wmt/wmt14", subset="de-en", split="validation"),
        TextSource(dataset="data/mine", split="validation"),
        TextSource(reader="jsonl", path="x/lines.jsonl"),
        TextSource("c.en", "c.pt", prefix="<2pt_BR>"),
        TextSource("d.en", "d.it", prefix="__"),
        TextSource(".gz", "e.it"),
    ]
    assert source_names(texts) == [
        *("news", "news_2", "talks_v2", "de", "de", "é-1.2_x", "de_2", "de_2_2", "wmt14_de-en", "mine", "lines"),
        *("2pt_BR", "d", "text"),
    ]
    assert source_names([]) == []
