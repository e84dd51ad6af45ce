"""`evaluate` with a translator that repeats its input: what it prints."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.__main__ import main
from pipeline.inference import translator
from pipeline.inference.metrics import METRICS


class WordCount:
    """Words for each reference word."""

    def signature(self) -> str:
        return "words:split"

    def statistics(self, hypothesis: str, reference: str) -> list[int]:
        return [len(hypothesis.split()), len(reference.split())]

    def score(self, statistics: Any) -> float:
        return 100.0 * statistics[0] / max(statistics[1], 1)


class Repeat:
    """Gives each sentence back; the one named `other` leaves the full stop out."""

    target_language, settings = "en", SimpleNamespace(beam_size=1, length_penalty=0.6)

    def __init__(self, name: str) -> None:
        self.name = name

    def translate(self, sentences: list[str], *, progress: bool) -> list[Any]:
        drops = self.name == "other"
        return [SimpleNamespace(text=line.removesuffix(" .") if drops else line) for line in sentences]


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.setattr(translator, "load_translator", lambda path, *_: Repeat(str(path)))

    def evaluate(lines: int, *options: str) -> Any:
        text = tmp_path / "text"
        text.write_text("A dog sees 3 cats .\n" * lines)
        assert main(["evaluate", "this", "--source", str(text), "--reference", str(text), *options]) == 0
        return capsys.readouterr()

    return evaluate


def test_a_registered_metric_is_printed_and_in_the_json(output: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METRICS, "word_count", WordCount())
    lines = output(5, "--versus", "other").out.splitlines()
    figures = json.loads(lines[-1])
    assert [line.split()[0] for line in lines[:5]] == ["bleu", "bleu_lowercase", "chrf", "word_count", "exact_match"]
    assert [line.split()[0] for line in lines[5:-1]] == ["bleu", "chrf", "word_count"]
    assert figures["word_count"] == 100
    assert figures["word_count_interval"] == [100, 100]
    assert figures["versus"]["word_count"] == pytest.approx(100 * 5 / 6, abs=1e-4)
    assert figures["versus"]["word_count_difference_is_real"] is True


@pytest.mark.parametrize(("lines", "warns"), [(99, False), (100, True)])
def test_translations_that_look_tokenized(output: Any, lines: int, warns: bool) -> None:
    assert ("the translations look tokenized" in output(lines).err) is warns
