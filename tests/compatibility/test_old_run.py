"""What an earlier version has written goes on with this one: run, corpus and bundle as they lie in version_X_Y_Z/.

`make_fixture.py` has made them. `expected.json` says what that version itself made of them.
"""

import json
import sys
import tarfile
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from pipeline.__main__ import main
from tests.compatibility.make_fixture import bundle_answers
from tests.conftest import pipeline
from tests.integration.runs import accumulator, scalars

VERSIONS = sorted(path.parent for path in Path(__file__).resolve().parent.glob("version_*/expected.json"))
SOURCE = ["--source", "texts/validation.source", "--reference", "texts/validation.target"]


class OldRun(NamedTuple):
    """A copy of what the earlier version has left, which is the working folder too."""

    folder: Path
    expected: dict[str, Any]


@pytest.fixture(params=VERSIONS, ids=lambda path: path.name)
def old(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OldRun:
    with tarfile.open(request.param / "files.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return OldRun(tmp_path, json.loads((request.param / "expected.json").read_text()))


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The lines that a command prints."""
    capsys.readouterr()
    assert main(list(arguments)) == 0
    return capsys.readouterr().out.splitlines()


def translations(capsys: pytest.CaptureFixture[str], checkpoint: str) -> list[list[Any]]:
    """Score and text of each validation source."""
    with Path("texts/validation.source").open() as text, mock.patch.object(sys, "stdin", text):
        lines = said(capsys, "translate", checkpoint, "--scores")
    return [[float(score), text] for score, text in (line.split("\t") for line in lines)]


def assert_same_translations(found: list[list[Any]], expected: list[list[Any]], tolerance: float) -> None:
    assert [text for _, text in found] == [text for _, text in expected]
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], abs=tolerance)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def counted_seconds(run: Path) -> float:
    """The time of all the steps that the run consists of, as far as it has been logged."""
    submitted = min(start["submitted"] for start in lines_of(run / "starts.jsonl"))
    last = [line for line in lines_of(run / "metrics.jsonl") if "work/goodput" in line][-1]
    return last["work/goodput"] * max(last["time"] - submitted, 1e-9)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_old_run_goes_on_at_its_step(old: OldRun, capsys: pytest.CaptureFixture[str]) -> None:
    """All of its state is taken up: what is logged and kept is what an uninterrupted run logs and keeps."""
    run, expected, step = old.folder / "run", old.expected, old.expected["stopped_at"]
    corpus, best = contents(old.folder / "corpus"), (run / "checkpoints" / "best.ckpt").read_bytes()
    before, seconds = lines_of(run / "metrics.jsonl"), counted_seconds(run)
    done = pipeline("fit", "--config", "recipe.yaml")
    assert done.returncode == 0, done.stderr.decode()
    assert f"resuming from run/checkpoints/step={step:08d}.ckpt" in done.stderr.decode()
    assert contents(old.folder / "corpus") == corpus  # taken as it is
    # The validation in which the run was stopped, then step after step: weights, moments, dropout, schedule, the
    # batches and the moving average are those of a run that was not stopped, and so is the best BLEU so far.
    lines = lines_of(run / "metrics.jsonl")
    assert lines[: len(before)] == before
    found = lines[len(before) :]
    assert [line["step"] for line in found] == [line["step"] for line in expected["curves"]]
    for line, curve in zip(found, expected["curves"], strict=True):
        assert {name: line[name] for name in curve} == pytest.approx(curve, rel=1e-3)
    # Patience goes on counting, the checkpoint saved in passing makes way, and a worse BLEU does not replace the best.
    last = expected["curves"][-1]["step"]
    assert f"stopped early at step {last}" in done.stderr.decode()
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == expected["checkpoints"]
    assert (run / "checkpoints" / "best.ckpt").read_bytes() == best
    # Curves have no gap and nothing twice, what is drawn once is not drawn again, and time is counted on.
    bleu = [line["step"] for line in lines if "validation/bleu" in line]
    assert [at for at, _ in scalars(run, "validation/bleu")] == bleu == sorted(set(bleu))
    assert len(accumulator(run).Images("what_it_looks_at/positions")) == 1
    assert counted_seconds(run) >= seconds
    assert_same_translations(
        translations(capsys, f"run/checkpoints/{expected['checkpoints'][-1]}"), expected["last"], tolerance=2e-3
    )
    [average] = said(capsys, "average", "run", "--last", "3")
    assert_same_translations(translations(capsys, average), expected["average"], tolerance=2e-3)


def test_an_old_checkpoint_is_evaluated_and_exported(old: OldRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert_same_translations(translations(capsys, "run"), old.expected["translations"], tolerance=1e-3)
    scores = json.loads(said(capsys, "evaluate", "run", *SOURCE, "--paper")[-1])
    assert {name: scores[name] for name in old.expected["scores"]} == pytest.approx(old.expected["scores"])
    assert scores["checkpoint"].endswith("best.ckpt")
    assert scores["bleu_paper"] >= 0
    assert said(capsys, "export", "run", "new", "--format", "ctranslate2") == ["new"]
    assert_same_card(old)


@pytest.mark.slow
def test_an_old_checkpoint_is_exported_to_every_format(old: OldRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "export", "run", "new") == ["new"]
    assert_same_card(old)
    assert contents(old.folder / "new").keys() == contents(old.folder / "bundle").keys()


def assert_same_card(old: OldRun) -> None:
    """What the new bundle says of the model is what the old one says."""
    was, now = (json.loads((old.folder / name / "card.json").read_text()) for name in ("bundle", "new"))
    for name in ("step", "vocabulary_size", "tokenizer_sha256", "data", "scores", "recipe"):
        assert now[name] == was[name], name
    assert now["code"]["trained"] == was["code"]["trained"]


def test_an_old_bundle_translates(old: OldRun) -> None:
    sentences = Path("texts/validation.source").read_text().splitlines()
    answers = bundle_answers(old.folder / "bundle", sentences)
    assert answers == old.expected["bundle"]
    assert answers[0] == [text for _, text in old.expected["translations"]]
