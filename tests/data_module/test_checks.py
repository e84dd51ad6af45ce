"""Checks of text and settings before a corpus is prepared."""

import logging
import os
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random

import pytest

from data_module.corpus.checks import check_folder, check_source, size_warnings, source_warnings
from data_module.corpus.preparation import prepare
from data_module.demo.corpus import Author, Lexicon, distinct_sentences
from data_module.errors import InputError
from data_module.settings import CorpusSettings, NoiseSettings, TextSource
from tests.conftest import another_user

GREEK = ["ένα μικρό σπίτι στέκεται κοντά στο δάσος", "οι παλιές γάτες κοιμούνται κάτω από το τραπέζι"]


def text_of(folder: Path, name: str, source: list[str], target: list[str]) -> TextSource:
    for side, lines in (("source", source), ("target", target)):
        (folder / f"{name}.{side}").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return TextSource(str(folder / f"{name}.source"), str(folder / f"{name}.target"))


def settings_of(folder: Path, train: list[TextSource], held_out: TextSource) -> CorpusSettings:
    return CorpusSettings(str(folder / "corpus"), train, [held_out], vocabulary_size=60)


def warnings_of(settings: CorpusSettings) -> list[str]:
    return source_warnings(settings, [check_source(text, settings) for text in settings.texts()])


@pytest.fixture(scope="module")
def sides() -> tuple[list[str], list[str]]:
    """400 English sentences and their German translations."""
    sentences = list(islice(distinct_sentences(Author(Lexicon(), Random(3))), 400))
    return [one.english for one in sentences], [one.german for one in sentences]


def test_swapped_sides_are_named(sides: tuple[list[str], list[str]], tmp_path: Path) -> None:
    """Of two training texts, the one whose sides are exchanged."""
    english, german = sides
    held_out = text_of(tmp_path, "held_out", english[300:], german[300:])
    right = text_of(tmp_path, "right", english[:150], german[:150])
    swapped = text_of(tmp_path, "swapped", german[150:300], english[150:300])
    assert warnings_of(settings_of(tmp_path, [right], held_out)) == []
    [warning] = warnings_of(settings_of(tmp_path, [right, swapped], held_out))
    names = f"{swapped.source}, {swapped.target}: its source resembles the target of {held_out.source}, "
    assert warning.startswith(names)
    assert warning.endswith("; exchange the sides of one of them")


def test_noise_that_the_tokenizer_does_not_know_or_that_is_the_same_in_all_epochs(tmp_path: Path) -> None:
    text = text_of(tmp_path, "train", ["a house"] * 9, ["ein Haus"] * 9)
    plain = settings_of(tmp_path, [text], text)
    for settings, said, way_out in (
        (
            replace(plain, noise=NoiseSettings(emoji=0.01), variants=2),
            "corpus.noise.emoji: without corpus.byte_fallback, ",
            {"byte_fallback": True},
        ),
        (
            replace(plain, noise=NoiseSettings(typos=0.1)),
            "corpus.variants 1: all epochs train on the same noise and segmentation; raise it",
            {"variants": 2},
        ),
    ):
        [warning] = warnings_of(settings)
        assert warning.startswith(said)
        assert warnings_of(replace(settings, **way_out)) == []


def test_sides_of_one_language_are_not_called_swapped(sides: tuple[list[str], list[str]], tmp_path: Path) -> None:
    """As where the task is not translation, or where one side is in no other text."""
    english, german = sides
    backwards = [" ".join(reversed(line.split())) for line in english]
    held_out = text_of(tmp_path, "held_out", english[300:], backwards[300:])
    for target in (backwards, german, GREEK * 200):
        text = text_of(tmp_path, "train", english[:300], target[:300])
        assert warnings_of(settings_of(tmp_path, [text], held_out)) == []
        text = text_of(tmp_path, "train", target[:300], english[:300])
        assert warnings_of(settings_of(tmp_path, [text], held_out)) == []
    # A few lines do not show a language.
    held_out = text_of(tmp_path, "held_out", english[:19], german[:19])
    text = text_of(tmp_path, "train", german, english)
    assert warnings_of(settings_of(tmp_path, [text], held_out)) == []
    held_out = text_of(tmp_path, "held_out", english[:20], german[:20])
    assert len(warnings_of(settings_of(tmp_path, [text], held_out))) == 1


@pytest.mark.parametrize(
    ("character", "name", "side"), [("\t", "a tab", "source"), ("\u2581", "U+2581 (\u2581)", "target")]
)
def test_characters_that_are_read_as_spaces_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, character: str, name: str, side: str
) -> None:
    """Tabs, and what sentencepiece cannot keep: `prepare` and `doctor` say so."""
    lines = {"source": ["a b"] * 3, "target": ["a b"] * 3}
    lines[side] = ["a b", f"a{character}b", f"{character}a b"]
    text = text_of(tmp_path, "train", lines["source"], lines["target"])
    settings = replace(settings_of(tmp_path, [text], text), vocabulary_size=7)
    expected = f"{getattr(text, side)}: {name} in 2 of 3 lines, line 2 first; it is read as a space"
    assert [warning[: len(expected)] for warning in warnings_of(settings)] == [expected] * 2
    with caplog.at_level(logging.WARNING, "data_module"):
        prepare(settings, progress=False)
    assert expected in caplog.text
    assert (tmp_path / "corpus" / f"validation.{side}.txt").read_text(encoding="utf-8") == "a b\n" * 3


def test_a_tab_in_a_file_of_two_columns_has_a_meaning(tmp_path: Path) -> None:
    (tmp_path / "pairs.tsv").write_text("a b\tc d\n" * 3)
    pairs = TextSource(tsv=str(tmp_path / "pairs.tsv"))
    assert warnings_of(settings_of(tmp_path, [pairs], pairs)) == []


def sizes(folder: Path, num_pairs: int, vocabulary_size: int, repeat: int = 1) -> list[str]:
    """Warnings about a text of 50 bytes a pair."""
    text = replace(text_of(folder, "train", ["a" * 24] * num_pairs, ["b" * 24] * num_pairs), repeat=repeat)
    settings = replace(settings_of(folder, [text], text), vocabulary_size=vocabulary_size)
    return size_warnings(settings, [check_source(one, settings) for one in settings.texts()])


def test_few_pairs_and_a_vocabulary_that_they_cannot_feed(tmp_path: Path) -> None:
    few, pieces = sizes(tmp_path, 50, 8000)
    assert few.startswith("corpus.train: 50 pairs are few: ")
    assert pieces.startswith("corpus.vocabulary_size 8000: each piece occurs only about 1 times")
    assert pieces.endswith("; set about 100")
    # 5,000 pairs are 250,000 bytes and about 50,000 tokens: 20 for each of 2,500 pieces, 40 for each of 1,250.
    assert len(sizes(tmp_path, 4999, 500)) == 1
    assert sizes(tmp_path, 4999, 499) == []  # Each piece occurs 100 times, as letters do.
    assert sizes(tmp_path, 5000, 2500) == []
    [pieces] = sizes(tmp_path, 5000, 2501)
    assert pieces.startswith("corpus.vocabulary_size 2501: each piece occurs only about 20 times")
    assert pieces.endswith("; set about 1200")
    assert sizes(tmp_path, 5000, 2501, repeat=2) == []
    [few] = sizes(tmp_path, 40, 500, repeat=200)
    assert few.startswith("corpus.train: 40 pairs are few: ")


def test_the_suggested_vocabulary_has_room_for_all_characters(tmp_path: Path) -> None:
    characters = "".join(map(chr, range(ord("一"), ord("一") + 300)))
    text = text_of(tmp_path, "train", [characters] * 9, ["abc"] * 9)
    settings = replace(settings_of(tmp_path, [text], text), vocabulary_size=4000)
    [_, pieces] = size_warnings(settings, [check_source(text, settings)] * 2)
    suggestion = int(pieces.rsplit(" ", 1)[1])
    assert suggestion == 2 * (300 + 3 + 1)  # with the line end


def test_bytes_and_symbols_need_no_text(tmp_path: Path) -> None:
    """2,500 pieces for words, and 256 + 2 that are there whatever the text is."""
    text = text_of(tmp_path, "train", ["a" * 24] * 5000, ["b" * 24] * 5000)
    plain = replace(settings_of(tmp_path, [text], text), byte_fallback=True, user_symbols=["<b>", "</b>"])
    checked = [check_source(one, plain) for one in plain.texts()]
    assert size_warnings(replace(plain, vocabulary_size=2500 + 258), checked) == []
    [warning] = size_warnings(replace(plain, vocabulary_size=2501 + 258), checked)
    assert warning.endswith("occurs only about 20 times, so that many are learned badly; set about 1458")


def test_symbols_that_the_training_text_holds_and_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_module.corpus.readers.CHUNK_BYTES", 20)  # a few lines
    one = text_of(tmp_path, "one", ["a house"] * 9 + ["<b>a <b>house"], ["ein Haus"] * 9 + ["<b>ein Haus"])
    two = text_of(tmp_path, "two", ["a house"] * 3, ["ein Haus", "§ein", "<b>Haus"])
    held_out = text_of(tmp_path, "held_out", [">>de<< a house"], ["ein Haus"])
    settings = replace(settings_of(tmp_path, [one, two], held_out), user_symbols=["§", "<b>", "</b>", ">>de<<"])
    holds, lacks = warnings_of(settings)
    assert holds == (
        f"corpus.user_symbols: the training text holds '§' ({two.target}:2; 0 times in the source, 1 in the target),"
        f" '<b>' ({one.source}:10; 2 times in the source, 2 in the target); each occurrence becomes this symbol:"
        " right for markup and placeholders, else choose another symbol"
    )
    assert lacks.startswith("corpus.user_symbols: the training text has no '</b>', '>>de<<': a network does not learn")
    several = [f"<{i}>" for i in range(8)]
    [lacks] = warnings_of(replace(settings, user_symbols=several))
    assert "has no '<0>', '<1>', '<2>', 5 more: " in lacks
    assert warnings_of(replace(settings, user_symbols=[])) == []
    # A prefix is put into the text at preparation, which must not hold it.
    prefixed = replace(settings, train=[replace(one, prefix=">>de<<"), two], validation=[two], user_symbols=[">>de<<"])
    assert warnings_of(prefixed) == []
    with pytest.raises(InputError, match=r"one\.source:10: the text holds the prefix '<b>' of its source already; "):
        warnings_of(replace(prefixed, train=[replace(one, prefix="<b>")], user_symbols=["<b>"]))


def test_a_run_that_takes_a_tokenizer_over_may_have_little_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = text_of(tmp_path, "train", ["a b c"], ["d e f"])
    settings = replace(settings_of(tmp_path, [text], text), vocabulary_size=15)
    prepare(settings, progress=False)
    assert "corpus.train: 1 pairs are few" in caplog.text
    caplog.clear()
    from data_module.tokenization.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(tmp_path / "corpus" / "tokenizer.model")
    prepare(settings, tokenizer, force=True, progress=False)
    assert "pairs are few" not in caplog.text


def test_a_lock_that_another_user_has_left() -> None:
    """One that all may read serves, one that others may not read is named; a new one is for all users."""
    with another_user() as folder:
        text = text_of(folder, "train", ["a"], ["b"])
        settings = settings_of(folder, [text], text)
        lock = folder / ".corpus.lock"
        lock.touch(0o400)
        check_folder(settings)
        prepare(replace(settings, vocabulary_size=7), progress=False)
        lock.chmod(0)
        message = f"{settings.folder}: cannot be locked: Permission denied ({lock}); remove that file if no prepare is"
        with pytest.raises(InputError) as caught:
            check_folder(settings)
        assert str(caught.value).startswith(message)
        with pytest.raises(InputError) as caught:
            prepare(settings, force=True, progress=False)
        assert str(caught.value).startswith(message)
        lock.unlink()
        mask = os.umask(0o077)
        try:
            prepare(replace(settings, vocabulary_size=7), force=True, progress=False)
        finally:
            os.umask(mask)
        assert lock.stat().st_mode & 0o777 == 0o666


def test_a_corpus_folder_that_cannot_be_created(tmp_path: Path) -> None:
    text = text_of(tmp_path, "train", ["a"], ["b"])
    settings = settings_of(tmp_path, [text], text)
    for good in ("corpus", "new/folder/corpus", "."):
        check_folder(replace(settings, folder=str(tmp_path / good)))
    # Nothing can be created below a file or in /proc, even by root.
    for bad, reason in ((f"{text.source}/corpus", "Not a directory"), ("/proc/corpus", "")):
        message = f"^{bad}: cannot be written: .*{reason}.*; name another corpus.folder$"
        with pytest.raises(InputError, match=message):
            check_folder(replace(settings, folder=bad))
        with pytest.raises(InputError, match=message):
            prepare(replace(settings, folder=bad), progress=False)
    assert not (tmp_path / "new").exists()
