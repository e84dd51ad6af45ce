"""Readers that an extension registers, and the checks that all readers pass through."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_module.corpus.checks import TextChecker
from data_module.corpus.pairs import all_available, open_reader, read_pairs
from data_module.corpus.readers import READERS, Reader, as_lines
from data_module.errors import InputError
from data_module.settings import CorpusSettings, TextSource
from pipeline.config.recipe import Recipe
from pipeline.doctor.doctor import Findings
from pipeline.doctor.recipe_checks import check_text
from pipeline.training.new_corpus import ensure_corpus
from tests.data_module.conftest import made


class Rows(Reader):
    """A JSON list of chunks, each of a list per side."""

    def chunks(self) -> Iterator[tuple[list[bytes], list[bytes]]]:
        for source, target in json.loads(Path(str(self.text.path)).read_text()):
            yield [line.encode() for line in source], [line.encode() for line in target]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CorpusSettings:
    monkeypatch.setitem(READERS, "rows", Rows)
    (tmp_path / "rows.json").write_text(json.dumps([[["a b c\n", "d e\n"], ["c b a\n", "e d\n"]], [[], []]]))
    text = TextSource(reader="rows", path=str(tmp_path / "rows.json"))
    return CorpusSettings(str(tmp_path / "corpus"), [text], [text], vocabulary_size=14)


def test_a_registered_reader_is_prepared_and_compared(settings: CorpusSettings, tmp_path: Path) -> None:
    manifest = made(settings)
    path = str(tmp_path / "rows.json")
    assert manifest["train"]["pairs_kept"] == 2
    assert manifest["settings"]["train"][0]["reader"] == "rows"
    assert [entry["file"] for entry in manifest["source_files"]] == [path]
    assert made(settings) == manifest
    (tmp_path / "rows.json").write_text(json.dumps([[["a\n"], ["b\n"]]]))
    with pytest.raises(InputError, match=f"{path} has changed"):
        made(settings)


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("row", "did you mean rows?"),
        ("jsonl", "registered are: rows; register it before the command starts"),
    ],
)
def test_an_unknown_reader_is_refused(settings: CorpusSettings, name: str, way_out: str) -> None:
    text = TextSource(reader=name, path="a")
    message = f"corpus: reader {name!r} is not registered; {way_out}"
    with pytest.raises(InputError) as caught:
        open_reader(text, settings)
    assert str(caught.value) == message
    assert found(settings, text) == [(False, message)]


def found(settings: CorpusSettings, text: TextSource) -> list[tuple[bool, str]]:
    """Return what `doctor` finds in a text source."""
    findings = Findings(Recipe("rows", settings), reads_texts=True)
    check_text(TextChecker(settings), "train", text, findings)
    return [(result.ok, result.message) for result in findings.results]


def test_a_prepared_corpus_does_not_need_its_reader(settings: CorpusSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    made(settings)
    monkeypatch.delitem(READERS, "rows")
    assert not all_available(settings)
    ensure_corpus(settings)


def test_doctor_and_availability(settings: CorpusSettings, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    assert all_available(settings)
    assert found(settings, settings.train[0]) == [(True, f"text {path}: 2 pairs")]
    path.unlink()
    assert not all_available(settings)
    message = f"text {path} is missing; put it there or correct its path in corpus:"
    assert found(settings, settings.train[0]) == [(False, message)]


@pytest.mark.parametrize(
    "chunk",
    [(["a\n", "b\n"], ["a\n"]), (["a\n"], ["a\n", "b\n"]), (["a", "b"], ["a", "b"]), (["a\nb\n"], ["a\nb\n"])],
)
def test_lines_that_are_not_aligned_are_refused(settings: CorpusSettings, tmp_path: Path, chunk: object) -> None:
    (tmp_path / "rows.json").write_text(json.dumps([[["x\n"], ["y\n"]], chunk]))
    with pytest.raises(InputError, match=r"rows\.json:2: the reader returned . source lines and . lines that end"):
        list(read_pairs(settings.train[0], settings))


def test_as_lines() -> None:
    assert as_lines(["ä\nb", b"\xff", None, ""]) == ["ä b\n".encode(), b"\xff\n", b"\n", b"\n"]
