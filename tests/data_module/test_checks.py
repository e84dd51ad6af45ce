"""Checks of text and settings before a corpus is prepared."""

from dataclasses import replace
from pathlib import Path

import pytest

from data_module.corpus.checks import TextChecker, check_folder, check_text, size_warnings, source_warnings
from data_module.corpus.preparation import prepare
from data_module.errors import InputError
from data_module.settings import CorpusSettings, TextSource
from data_module.tokenization.tokenizer import Tokenizer
from tests.conftest import another_user


def text_of(folder: Path, name: str, source: list[str], target: list[str]) -> TextSource:
    for side, lines in (("source", source), ("target", target)):
        (folder / f"{name}.{side}").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return TextSource(str(folder / f"{name}.source"), str(folder / f"{name}.target"))


def settings_of(folder: Path, train: list[TextSource], held_out: TextSource) -> CorpusSettings:
    return CorpusSettings(str(folder / "corpus"), train, [held_out], vocabulary_size=60)


def warnings_of(settings: CorpusSettings) -> list[str]:
    return source_warnings(settings, check_text(settings))


def sizes(folder: Path, num_pairs: int, vocabulary_size: int, **options: object) -> list[str]:
    """Warnings about a text of 50 bytes a pair."""
    text = text_of(folder, "train", ["a" * 24] * num_pairs, ["b" * 24] * num_pairs)
    settings = replace(settings_of(folder, [text], text), vocabulary_size=vocabulary_size, **options)
    return size_warnings(settings, check_text(settings))


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
    assert pieces.endswith("; set about 1250")
    # Bytes and symbols need no text.
    reserved = {"byte_fallback": True, "user_symbols": ["<b>", "</b>"]}
    assert sizes(tmp_path, 5000, 2500 + 258, **reserved) == []
    [pieces] = sizes(tmp_path, 5000, 2501 + 258, **reserved)
    assert pieces.endswith("occurs only about 20 times, so that many are learned badly; set about 1508")


def test_the_suggested_vocabulary_has_room_for_all_characters(tmp_path: Path) -> None:
    characters = "".join(map(chr, range(ord("一"), ord("一") + 300)))
    text = text_of(tmp_path, "train", [characters] * 9, ["abc"] * 9)
    settings = replace(settings_of(tmp_path, [text], text), vocabulary_size=4000)
    [_, pieces] = size_warnings(settings, check_text(settings))
    assert int(pieces.rsplit(" ", 1)[1]) == 2 * (300 + 3 + 1)  # with the line end


def test_symbols_that_the_training_text_lacks(tmp_path: Path) -> None:
    one = text_of(tmp_path, "one", ["a house"] * 9 + ["<b>a <b>house"], ["ein Haus"] * 10)
    two = text_of(tmp_path, "two", ["a house"] * 3, ["ein Haus", "§ein", "Haus"])
    held_out = text_of(tmp_path, "held_out", [">>de<< a house"], ["ein Haus"])
    settings = replace(settings_of(tmp_path, [one, two], held_out), user_symbols=["§", "<b>", "</b>", ">>de<<"])
    [lacks] = warnings_of(settings)
    assert lacks.startswith("corpus.user_symbols: the training text has no '</b>', '>>de<<': a network does not learn")
    assert "list is written" not in lacks
    [lacks] = warnings_of(replace(settings, user_symbols=["<b>,</b>"]))
    assert lacks.endswith("; a list is written ['<b>', '</b>']")
    # A prefix is put into the text at preparation, which must not hold it.
    prefixed = replace(settings, train=[replace(one, prefix=">>de<<"), two], user_symbols=[">>de<<"])
    assert warnings_of(prefixed) == []
    with pytest.raises(InputError, match=r"one\.source:10: the pair holds the prefix '<b>' of its source already; "):
        warnings_of(replace(prefixed, train=[replace(one, prefix="<b>")], user_symbols=["<b>"]))
    with pytest.raises(InputError, match=r"two\.target:2: the pair holds the prefix '§' of its source already; "):
        warnings_of(replace(prefixed, train=[replace(two, prefix="§")], user_symbols=["§"]))


def test_marks_that_are_probably_no_part_of_the_text(tmp_path: Path) -> None:
    text = text_of(tmp_path, "train", ["\ufeffa house", "b\rc", "\ufeffd"], ["ein Haus", "b\r", "d"])
    inside, joined = warnings_of(settings_of(tmp_path, [text], replace(text, prefix=None)))[:2]
    assert inside.startswith(f"{text.source}: line 2: carriage returns inside, read as spaces; if they end lines, ")
    assert joined.startswith(f"{text.source}: line 3: U+FEFF inside, as from joined files; remove it (sed ")
    (tmp_path / "text.tsv").write_bytes(b"a\rb\tc\r\nd\te\rf\r\n")
    table = TextSource(tsv=str(tmp_path / "text.tsv"))
    one, two = TextChecker(settings_of(tmp_path, [table], table)).check("train", table).marks
    assert ("line 1: carriage" in one, "line 2: carriage" in two) == (True, True)
    # Where they end the lines of one side, the sides have other numbers of lines.
    old = text_of(tmp_path, "old", ["a\rb\rc\r"], ["a", "b", "c"])
    with pytest.raises(InputError, match=r"old\.source: 1 lines, but .* missing .*old\.source: line 1: carriage"):
        check_text(settings_of(tmp_path, [old], old))


def test_accents_that_are_characters_of_their_own(tmp_path: Path) -> None:
    """A word must not have two spellings, within a file or in two; one of the two alone is as good as the other."""
    composed, decomposed = ["caf\xe9", "가", "が"], ["cafe\u0301", "\u1100\u1161", "か\u3099"]
    plain = ["a", "b", "\u025b\u0303"]  # no one character has both of the last
    one, other = text_of(tmp_path, "one", composed, plain), text_of(tmp_path, "other", plain, decomposed)
    assert warnings_of(settings_of(tmp_path, [one], one)) == []
    assert warnings_of(settings_of(tmp_path, [other], other)) == []
    for train, held_out in ((one, other), (other, one)):
        [warning] = warnings_of(settings_of(tmp_path, [train], held_out))
        assert warning.startswith(f"{other.target}: 3 lines, 1, 2, 3: accents are characters of their own (NFD), where")
    mixed = text_of(tmp_path, "mixed", plain, ["caf\xe9", "b", "cafe\u0301"])
    assert warnings_of(settings_of(tmp_path, [mixed], one))[0].startswith(f"{mixed.target}: line 3: accents are")


@pytest.mark.parametrize(
    ("source", "target", "named"),
    [("el", "tr_TR", "el and tr_TR"), ("en", "az", "az"), ("elx", "en", None), ("en", "de+fr", None)],
)
def test_lower_case_letter_by_letter(tmp_path: Path, source: str, target: str, named: str | None) -> None:
    text = text_of(tmp_path, "train", ["a@@ b"] * 30, ["b"] * 30)
    settings = replace(settings_of(tmp_path, [text], text), source_language=source, target_language=target)
    parts, *others = warnings_of(settings)
    assert parts.startswith("corpus.train: 100% of its source lines have words in parts (@@)")
    found = warnings_of(replace(settings, lowercase=True))[1 + len(others) :]
    assert [named in line for line in found if named] == [True] * bool(named)
    assert len(found) == bool(named)


def test_words_as_pieces(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No length in characters counts, symbols and prefixes are whole words, and unknown words are counted."""
    lines = ["<a> <b>", "x<t> a", *["a"] * 5, "b b zz yy b zz", " ".join(["w" * 60] * 9), " ".join(["a"] * 21)]
    text = replace(text_of(tmp_path, "train", lines, ["a"] * len(lines)), prefix="b>")
    settings = replace(settings_of(tmp_path, [text], replace(text, prefix=None)), vocabulary_size=10, max_tokens=20)
    settings = replace(settings, model_type="word", user_symbols=["b>", "<t>"])
    manifest = prepare(settings, progress=False)
    assert manifest["train"]["pairs_dropped"]["too_long"] == {"pairs": 1, "first_lines": [f"{text.source}:10"]}
    assert "corpus.user_symbols: the training text has no '<t>'" in caplog.text
    pieces = Tokenizer.load(tmp_path / "corpus" / "tokenizer.model").pieces()
    assert pieces[4:] == ["▁b>", "▁<t>", "▁a", "▁" + "w" * 60, "▁b", "▁zz"]
    # Of lines 1 and 2 three words, and one of line 8.
    counted = (
        "corpus.vocabulary_size 10: 4 tokens of the training text have no piece and are unknown to the model; the "
    )
    assert f"{counted}first is '<a>' ({text.source}:1)" in caplog.text
    assert "training text's pieces are unknown" not in caplog.text
    (tmp_path / "train.source").write_text("a b>\n" * len(lines))
    with pytest.raises(InputError, match=r"train\.source:1: the pair holds the prefix 'b>' of its source already"):
        check_text(settings)


def test_characters_as_pieces_are_told_no_size(tmp_path: Path) -> None:
    """The text has one size only."""
    [few] = sizes(tmp_path, 50, 80, model_type="char")
    assert few.startswith("corpus.train: 50 pairs are few")
    assert sizes(tmp_path, 50, 7, model_type="char") == []


def test_a_run_that_takes_a_tokenizer_over_may_have_little_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = text_of(tmp_path, "train", ["a b c"], ["d e f"])
    settings = replace(settings_of(tmp_path, [text], text), vocabulary_size=15)
    prepare(settings, progress=False)
    assert "corpus.train: 1 pairs are few" in caplog.text
    caplog.clear()
    tokenizer = Tokenizer.load(tmp_path / "corpus" / "tokenizer.model")
    prepare(settings, tokenizer, force=True, progress=False)
    assert "pairs are few" not in caplog.text


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


def test_a_lock_that_another_user_has_left() -> None:
    with another_user() as folder:
        text = text_of(folder, "train", ["a"], ["b"])
        (folder / ".corpus.lock").touch(0o444)
        with pytest.raises(InputError, match=r"\.corpus\.lock: belongs to another user; remove it if that user is not"):
            check_folder(settings_of(folder, [text], text))
