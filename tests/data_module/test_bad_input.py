"""Every input error gives one line that names the file and what to do, leaves nothing behind, and can be corrected."""

import errno
import gzip
import os
from collections.abc import Callable
from dataclasses import replace
from math import inf, nan
from pathlib import Path

import pytest

from data_module.corpus.checks import check_settings, check_text
from data_module.corpus.manifest import Manifest
from data_module.corpus.store import TokenStoreWriter, open_corpus
from data_module.errors import InputError
from data_module.settings import BpeDropout, CorpusSettings, NoiseSettings, TextSource
from data_module.tokenization.tokenizer import Tokenizer
from tests.conftest import another_user
from tests.data_module.conftest import fails, made, text_of

SOURCE = ["one house", "two houses", "three red houses", "four"]
TARGET = ["ein Haus", "zwei Häuser", "drei rote Häuser", "vier"]


class Workplace:
    """A folder of valid text files, and functions that prepare a corpus from them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        text = TextSource(str(self.write("train.en", SOURCE)), str(self.write("train.de", TARGET)))
        held_out = TextSource(str(self.write("dev.en", ["a house"])), str(self.write("dev.de", ["ein Haus"])))
        self.settings = CorpusSettings(str(folder / "corpus"), [text], [held_out], vocabulary_size=35)

    def write(self, name: str, lines: list[str] | bytes) -> Path:
        data = lines if isinstance(lines, bytes) else "".join(line + "\n" for line in lines).encode()
        (self.folder / name).write_bytes(data)
        return self.folder / name

    def fails(self, *parts: str, **changes: object) -> str:
        return fails(self.settings, *parts, **changes)

    def works(self, **changes: object) -> Manifest:
        manifest = made(replace(self.settings, **changes))
        assert len(open_corpus(self.folder / "corpus", "train")) == manifest["train"]["pairs_kept"]
        return manifest

    def source_text(self) -> list[str]:
        return [source for source, _ in text_of(self.settings)]


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    return Workplace(tmp_path)


@pytest.mark.parametrize(
    ("shorter", "longer", "compressed"), [("train.de", "train.en", False), ("train.en", "train.de", True)]
)
def test_unequal_line_counts(
    place: Workplace, monkeypatch: pytest.MonkeyPatch, shorter: str, longer: str, compressed: bool
) -> None:
    monkeypatch.setattr("data_module.corpus.readers.CHUNK_BYTES", 20)  # two lines
    ending = ".gz" if compressed else ""
    for name in (shorter, longer):
        text = (place.folder / name).read_bytes()
        place.write(name + ending, gzip.compress(text) if compressed else text)
    text = TextSource(str(place.folder / f"train.en{ending}"), str(place.folder / f"train.de{ending}"))
    whole = (place.folder / (shorter + ending)).read_bytes()
    cut = b"first\nsecond\nthird\n"
    place.write(shorter + ending, gzip.compress(cut) if compressed else cut)
    place.fails(f"{shorter}{ending}: 3 lines, but", f"{longer}{ending} has 4: line i of one", train=[text])
    place.write(shorter + ending, whole)
    assert place.works(train=[text])["train"]["pairs_kept"] == 4


def test_unreadable_file() -> None:
    with another_user() as folder:
        place = Workplace(folder)
        (folder / "train.en").chmod(0)
        place.fails("train.en: permission denied; ask for read permission")
        (folder / "train.en").chmod(0o644)
        place.works()


def be_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        ("dev.en", Path.unlink, "no such file; correct the path"),
        ("dev.de", Path.unlink, "no such file; correct the path"),
        ("train.en", be_a_folder, "a folder, not a file"),
        ("train.en", lambda path: path.write_bytes(b""), "0 lines, but "),
        ("dev.de", lambda path: path.write_bytes(b""), "0 lines, but "),
    ],
)
def test_a_file_that_is_no_text(place: Workplace, name: str, spoil: Callable[[Path], object], message: str) -> None:
    path = place.folder / name
    text = path.read_bytes()
    spoil(path)
    place.fails(f"{name}: {message}")
    if path.is_dir():
        path.rmdir()
    place.write(name, text)
    place.works()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("one", "1 tab-separated column, not two; correct the line"),
        ("a\tb\tc", "3 tab-separated columns, not two; correct the line, or change all lines: cut -f1,2 drops other"),
    ],
)
def test_tsv_line_with_other_than_two_columns(
    place: Workplace, line: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_module.corpus.readers.CHUNK_BYTES", 20)  # two lines
    rows = ["\t".join(pair) for pair in zip(SOURCE, TARGET, strict=True)]
    text = TextSource(tsv=str(place.write("train.tsv", [*rows[:2], line, *rows[2:]])))
    place.fails(f"train.tsv:3: {message}", train=[text])
    place.write("train.tsv", rows)
    assert place.works(train=[text])["train"]["pairs_kept"] == 4


def test_invalid_utf8(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_module.corpus.readers.CHUNK_BYTES", 20)  # two lines
    lines = [line.encode() + b"\n" for line in TARGET]
    place.write("train.de", b"".join(lines[:2]) + b"drei H\xe4user\n" + lines[3])
    message = place.fails("train.de:3: invalid UTF-8; correct the line, or set `corpus.drop_invalid_utf8: true`")
    with pytest.raises(InputError) as caught:  # also without preparing
        check_text(place.settings)
    assert str(caught.value) == message
    account = place.works(drop_invalid_utf8=True)["train"]
    assert account["pairs_dropped"]["invalid_utf8"]["pairs"] == 1
    assert account["pairs_dropped"]["invalid_utf8"]["first_lines"][0].endswith("train.de:3")
    assert place.source_text() == [*SOURCE[:2], SOURCE[3]]


def test_both_sides_the_same_file(place: Workplace) -> None:
    name = place.settings.train[0].source
    (place.folder / "link.de").symlink_to(str(name))
    for other in (name, str(place.folder / "link.de")):
        place.fails("train.en: source and target are the same file", train=[TextSource(name, other)])


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk(place: Workplace, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Nothing is left of a new corpus, and all of the old one when it is rebuilt."""

    def full(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(TokenStoreWriter, "append_flat", full)
        place.fails("corpus: the disk is full, nothing was kept; free space")
    manifest = place.works()
    with monkeypatch.context() as patch:
        patch.setattr("data_module.system.files.sync_to_disk", full)
        with pytest.raises(InputError, match="disk is full"):
            made(place.settings, force=True)
    assert place.works() == manifest


def test_bytes_that_neither_end_a_line_nor_are_text(place: Workplace) -> None:
    """A byte order mark, carriage returns, NUL, and all that `str.splitlines` splits at; the last line has no end."""
    spaces = "\u2028\u2029\x85\v\f\r\x1c\x1e\x1f\0"
    lines = [SOURCE[0], spaces.join(SOURCE[1].split()), *SOURCE[2:]]
    place.write("train.en", ("\ufeff" + "\r\n".join(lines)).encode())
    assert place.works()["train"]["pairs_kept"] == 4
    assert place.source_text() == SOURCE


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        *((key, [], "it is []") for key in ("train", "validation")),
        *(("vocabulary_size", value, f"it is {value}") for value in (0, 2**31)),
        ("tokenizer_sentences", 1, "it is 1"),
        *(("character_coverage", value, f"it is {value}") for value in (0.97, 1.01)),
        *(("max_tokens", value, f"it is {value}") for value in (0, 65_535)),
        ("max_length_ratio", 0.99, "it is 0.99"),
        ("seed", -1, "it is -1"),
        ("variants", 0, "must be 1 or more; it is 0"),
        ("variants", 3, "3 encodings would all be the same; set corpus.noise or "),
        ("user_symbols", ["<b>", ""], "'' is empty"),
        *(("user_symbols", [symbol], f"{symbol!r} has white space") for symbol in ("<b c>", "a\tb", "\u2581a")),
        ("user_symbols", ["[>>a<<, >>b<<]"], "words end; write it without; a list is written ['>>a<<', '>>b<<']"),
        ("user_symbols", ["<b>", "</b>", "<b>"], "'<b>' occurs twice"),
        ("user_symbols", ["</s>"], "'</s>' is the name of a special piece"),
    ],
)
def test_settings_out_of_range(place: Workplace, key: str, value: object, message: str) -> None:
    place.fails(f"corpus.{key}: ", message, **{key: value})


@pytest.mark.parametrize(
    ("key", "value", "others"),
    [
        ("bpe_dropout", BpeDropout(0.1), ("unigram", "word", "char")),
        ("byte_fallback", True, ("word",)),
        ("split_digits", True, ("word",)),
        ("character_coverage", 0.99, ("word",)),
    ],
)
def test_settings_that_a_type_of_vocabulary_does_not_have(
    place: Workplace, key: str, value: object, others: tuple[str, ...]
) -> None:
    for kind in ("bpe", "unigram", "word", "char"):
        changed = replace(place.settings, model_type=kind, **{key: value})
        if kind in others:
            place.fails(
                f"corpus.{key}: is not for corpus.model_type {kind}; remove it", model_type=kind, **{key: value}
            )
        else:
            check_settings(changed)
    place.fails("'<B>' has capitals, which corpus.lo", model_type="word", lowercase=True, user_symbols=["<B>"])
    check_settings(replace(place.settings, model_type="word", lowercase=True, user_symbols=["<b>"]))
    check_settings(replace(place.settings, model_type="char", lowercase=True, user_symbols=["<B>"]))


def test_validation_text_of_which_no_pair_is_left(place: Workplace) -> None:
    place.fails("corpus.validation: no pair is left (too_long: 1)", max_tokens=1)


FILES = {"source": "a", "target": "b"}


@pytest.mark.parametrize(
    ("kind", "keys", "message"),
    [
        *(
            (TextSource, keys, f"this one has {' and '.join(keys) or 'none of them'}$")
            for keys in (
                {},
                {"source": "a"},
                {**FILES, "tsv": "c"},
                {"dataset": "a"},
                {"split": "train"},
                {"tsv": "a", "subset": "de-en"},
                {**FILES, "dataset": "c", "split": "train"},
            )
        ),
        (TextSource, {**FILES, "target_language": "de"}, "of a text source are for data sets; remove them"),
        *(
            (TextSource, {**FILES, "name": name}, "`name` of a text source is .*; use letters")
            for name in ("", "a b", "a/b", "a\n", "é:")
        ),
        *(
            (TextSource, {**FILES, "weight": weight}, "`weight` of a text source is .* it must be above 0")
            for weight in (0.0, -1.0, inf, nan)
        ),
        (BpeDropout, {"target": 1}, r"corpus\.bpe_dropout\.target 1 is not from 0 to below 1"),
        (NoiseSettings, {"typos": 1.5}, r"corpus\.noise\.typos 1\.5 is not from 0 to 1"),
        (NoiseSettings, {"number": nan}, r"corpus\.noise\.number nan is not from 0 to 1"),
        (
            NoiseSettings,
            {"lower_case": 0.5, "upper_case": 0.6},
            r"corpus\.noise\.lower_case, title_case and upper_case are 1\.1 together",
        ),
    ],
)
def test_keys_and_values_that_are_refused(kind: type, keys: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**keys)


def test_test_text_is_checked_before_any_work(place: Workplace) -> None:
    text = TextSource(str(place.folder / "test.en"), str(place.folder / "test.de"))
    place.fails("test.en: no such file", test=[text])
    place.write("test.en", SOURCE)
    place.write("test.de", TARGET[:3])
    place.fails("test.de: 3 lines, but", "test.en has 4", test=[text])
    place.write("test.de", TARGET)
    place.works(test=[text])


def test_text_that_is_unknown_to_the_tokenizer(place: Workplace, caplog: pytest.LogCaptureFixture) -> None:
    place.works()
    place.write("dev.en", ["one house two houses three red houses four " * 3 + "ξ"])
    made(place.settings, force=True)
    assert "unknown" not in caplog.text
    place.write("dev.en", ["ένα σπίτι"])
    made(place.settings, force=True)
    assert "20 % of the validation text's pieces are unknown to the tokenizer" in caplog.text
    assert "training text" not in caplog.text
    tokenizer = Tokenizer.load(place.folder / "corpus" / "tokenizer.model")
    place.write("train.en", ["house " * 7])
    place.write("train.de", ["ξ " * 27])
    made(place.settings, tokenizer=tokenizer, force=True)
    assert "44 % of the training text's pieces are unknown" in caplog.text


def test_a_user_symbol_with_the_name_of_a_byte(place: Workplace) -> None:
    place.fails("'<0x0A>' is the name of a special piece", user_symbols=["<0x0A>"], byte_fallback=True)
    place.works(user_symbols=["<0x0A>"])
