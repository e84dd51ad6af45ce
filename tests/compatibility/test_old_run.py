"""Runs, corpora and bundles of earlier versions can be used with this one.

`make_fixture.py` has written them to version_X_Y_Z/, with the results of that version in `expected.json`.
"""

import json
import statistics
import sys
import tarfile
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from pipeline import load
from pipeline.__main__ import main
from pipeline.monitoring.log_files import read_metrics
from tests.compatibility.make_fixture import bundle_outputs
from tests.conftest import pipeline
from tests.integration.runs import accumulator, scalars

VERSIONS = sorted(path.parent for path in Path(__file__).resolve().parent.glob("version_*/expected.json"))
SOURCE = ["--source", "texts/validation.source", "--reference", "texts/validation.target"]


class OldRun(NamedTuple):
    """A copy of the earlier version's files, in the current working folder, and its results."""

    folder: Path
    expected: dict[str, Any]


@pytest.fixture(params=VERSIONS, ids=lambda path: path.name)
def old(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OldRun:
    with tarfile.open(request.param / "files.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return OldRun(tmp_path, json.loads((request.param / "expected.json").read_text()))


def output_lines(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """Run a command and return the lines of its output."""
    capsys.readouterr()
    assert main(list(arguments)) == 0
    return capsys.readouterr().out.splitlines()


def translations(capsys: pytest.CaptureFixture[str], checkpoint: str) -> list[list[Any]]:
    """Return score and text of the translation of each validation source."""
    with Path("texts/validation.source").open() as text, mock.patch.object(sys, "stdin", text):
        lines = output_lines(capsys, "translate", checkpoint, "--scores")
    return [[float(score), text] for score, text in (line.split("\t") for line in lines)]


def assert_same_translations(found: list[list[Any]], expected: list[list[Any]], tolerance: float) -> None:
    assert [text for _, text in found] == [text for _, text in expected]
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], abs=tolerance)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def productive_seconds(run: Path) -> float:
    """Return the total time of the steps of the run, repeated ones excluded, from the last logged goodput."""
    submitted = min(start["submitted"] for start in read_jsonl(run / "starts.jsonl"))
    last = [line for line in read_metrics(run) if "train_perf/goodput" in line][-1]
    return last["train_perf/goodput"] * max(last["time"] - submitted, 1e-9)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_old_run_resumes_at_its_step(old: OldRun, capsys: pytest.CaptureFixture[str]) -> None:
    """All of its state is restored, except the position in an epoch: this version has other global batches."""
    run, expected, step = old.folder / "run", old.expected, old.expected["stopped_at"]
    corpus, best = contents(old.folder / "corpus"), (run / "checkpoints" / "best.ckpt").read_bytes()
    before, seconds = read_jsonl(run / "metrics.jsonl"), productive_seconds(run)
    done = pipeline("fit", "--config", "recipe.yaml")
    assert done.returncode == 0, done.stderr.decode()
    assert f"resuming from run/checkpoints/step={step:08d}.ckpt" in done.stderr.decode()
    assert contents(old.folder / "corpus") == corpus  # not prepared again
    [warning] = [line for line in done.stderr.decode().splitlines() if "batches pairs in another way" in line]
    assert "the rest of epoch 30 is left out, and training goes on with epoch 31" in warning
    # The interrupted validation is repeated with the same result, so weights and moving average were restored. Training
    # goes on as well as that version did, so moments and schedule were.
    lines = read_jsonl(run / "metrics.jsonl")
    assert lines[: len(before)] == before
    found = lines[len(before) :]
    assert [line["step"] for line in found] == [line["step"] for line in expected["curves"]]
    for line, curve in zip(found, expected["curves"], strict=True):
        if curve["step"] == step:
            assert {name: line[name] for name in curve} == pytest.approx(curve, rel=1e-3)
        elif "train/loss" in curve:
            assert line["train/learning_rate"] == pytest.approx(curve["train/learning_rate"])
            assert line["train/loss"] == pytest.approx(curve["train/loss"], rel=0.1)
        else:
            assert line["validation/best_bleu"] == pytest.approx(curve["validation/best_bleu"])
            assert line["validation/loss"] == pytest.approx(curve["validation/loss"], rel=0.1)
    assert found[1]["train_perf/epoch"] > 30
    assert_summary_has_one_name_a_curve(run)
    # Patience keeps counting, the checkpoint of the stop is replaced, and a worse BLEU does not replace the best.
    last = expected["curves"][-1]["step"]
    assert f"stopped early at step {last}" in done.stderr.decode()
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == expected["checkpoints"]
    assert (run / "checkpoints" / "best.ckpt").read_bytes() == best
    # Curves have neither gaps nor duplicates, the plot of positions is not repeated, and goodput counts earlier time.
    bleu = [line["step"] for line in lines if "validation/bleu" in line]
    assert [at for at, _ in scalars(run, "validation/bleu")] == bleu == sorted(set(bleu))
    images = [tag for tag in accumulator(run).Tags()["images"] if tag.endswith("/positions")]
    assert [len(accumulator(run).Images(tag)) for tag in images] == [1]
    assert productive_seconds(run) >= seconds
    [average] = output_lines(capsys, "average", "run", "--last", "3")  # of both versions' checkpoints
    assert len(translations(capsys, average)) == len(expected["average"])


def assert_summary_has_one_name_a_curve(run: Path) -> None:
    """Whatever earlier versions called it; the speed is that of all starts."""
    summary, lines = json.loads((run / "summary.json").read_text()), list(read_metrics(run))
    assert not [name for name in summary["last"] if name.startswith("work/")]
    assert {"train_perf/goodput", "train_perf/mfu", "train_perf/epoch"} <= summary["last"].keys()
    speeds = [line[name] for line in lines for name in line if name == "train_perf/target_tokens_per_second"]
    assert len(speeds) == len([line for line in lines if "train/loss" in line])
    assert summary["target_tokens_per_second"] == pytest.approx(statistics.median(speeds))


def test_an_old_checkpoint_is_evaluated_and_exported(old: OldRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert_same_translations(translations(capsys, "run"), old.expected["translations"], tolerance=1e-3)
    scores = json.loads(output_lines(capsys, "evaluate", "run", *SOURCE, "--paper")[-1])
    assert {name: scores[name] for name in old.expected["scores"]} == pytest.approx(old.expected["scores"])
    assert scores["checkpoint"].endswith("best.ckpt")
    assert scores["bleu_paper"] >= 0
    assert output_lines(capsys, "export", "run", "new", "--format", "ctranslate2") == ["new"]
    assert_same_card(old)


@pytest.mark.slow
def test_an_old_checkpoint_is_exported_to_every_format(old: OldRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert output_lines(capsys, "export", "run", "new") == ["new"]
    assert_same_card(old)
    names, old_names = (contents(old.folder / name).keys() for name in ("new", "bundle"))
    assert {name for name in names if not name.startswith("huggingface/")} == old_names  # a format since 0.3.0


def assert_same_card(old: OldRun) -> None:
    """Check that the card of the new bundle describes the model as that of the old bundle."""
    old_card, new_card = (json.loads((old.folder / name / "card.json").read_text()) for name in ("bundle", "new"))
    for name in ("step", "vocabulary_size", "tokenizer_sha256", "data", "scores", "recipe"):
        assert new_card[name] == old_card[name], name
    assert new_card["code"]["trained"] == old_card["code"]["trained"]


def test_an_old_bundle_translates(old: OldRun) -> None:
    sentences = Path("texts/validation.source").read_text().splitlines()
    outputs = bundle_outputs(old.folder / "bundle", sentences)
    assert outputs == old.expected["bundle"]
    assert outputs[0] == [text for _, text in old.expected["translations"]]


def test_an_old_run_and_an_old_bundle_in_python(old: OldRun) -> None:
    """Their answers are those of the earlier version, and teacher forcing gives them the same scores."""
    sentences = Path("texts/validation.source").read_text().splitlines()
    expected = old.expected["translations"]
    for path in ("run", "bundle"):
        model = load(path)
        found = [best for (best,) in model.translate(sentences, n_best=1)]
        assert_same_translations([[one.score, one.text] for one in found], expected, tolerance=1e-3)
        scored = model.score(sentences, [one.text for one in found])
        alike = [(one, other) for one, other in zip(found, scored, strict=True) if one.num_tokens == other.num_tokens]
        assert len(alike) > len(sentences) / 2
        assert all(other.score == pytest.approx(one.score, abs=1e-4) for one, other in alike)
