"""What any version with format 2 has written can be used: resumed, averaged, translated with, evaluated, exported.

Version 1.0.0 has written format_2/files.tar.xz, and format_2/expected.json says what it read from it. They are never
made anew while the format is 2. Git's history has the program that made them, format_2/make.py: a new format gets files
of its own.
"""

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from data_module.system.files import PlainValues
from pipeline import load
from pipeline.checkpointing.checkpoint import read_checkpoint
from pipeline.checkpointing.run_folder import read_metrics, step_path
from tests.conftest import run_here

HERE = Path(__file__).resolve().parent / "format_2"
LAST_STEP = 400
RESUME = ["fit", "--config", "recipe.yaml", "--trainer.max_steps", str(LAST_STEP + 4)]
RESUME += ["--trainer.val_check_interval", "4", "--run.log_every_steps", "1"]
TEXT = ["--source", "texts/validation.source", "--reference", "texts/validation.target"]


@pytest.fixture
def expected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PlainValues:
    """What the version that made the files read from them; the working folder has a copy of them."""
    with tarfile.open(HERE / "files.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return json.loads((HERE / "expected.json").read_text())


def state_after_resuming() -> dict[str, Any]:
    """Return the curves of the resumed run, and the sum of Adam's second moments in its last checkpoint."""
    curves = [line for line in read_metrics(Path("run")) if line["step"] > LAST_STEP]
    [optimizer] = read_checkpoint(step_path(Path("run"), LAST_STEP + 4)).contents["optimizer_states"]
    return {
        "loss": [line["train/loss"] for line in curves if "train/loss" in line],
        "learning_rate": [line["train/learning_rate"] for line in curves if "train/loss" in line],
        "validation_loss": [line["validation/loss"] for line in curves if "validation/loss" in line],
        "second_moments": sum(float(state["exp_avg_sq"].sum()) for state in optimizer["state"].values()),
    }


def test_a_run_is_resumed_and_averaged(expected: PlainValues) -> None:
    """Weights, their average, moments, schedule and the corpus are those of the files."""
    before = Path("run/metrics.jsonl").read_text()
    corpus = {path: path.read_bytes() for path in Path("corpus").iterdir()}
    assert f"resuming from {step_path(Path('run'), LAST_STEP)}" in run_here(*RESUME)[1]
    assert {path: path.read_bytes() for path in Path("corpus").glob("[!.]*")} == corpus  # without the noted run
    assert Path("run/metrics.jsonl").read_text().startswith(before)
    found = state_after_resuming()
    # Another version may draw other batches.
    assert found["learning_rate"] == pytest.approx(expected["learning_rate"])
    assert found["loss"] == pytest.approx(expected["loss"], rel=0.3)
    assert found["validation_loss"] == pytest.approx(expected["validation_loss"], rel=0.05)
    assert found["second_moments"] == pytest.approx(expected["second_moments"], rel=0.3)
    [average] = run_here("average", "run", "--last", 2)[0].splitlines()
    assert load(average).translate("a b c d") == "A B C D"


def test_a_run_and_a_bundle_translate_and_the_run_is_exported(expected: PlainValues) -> None:
    assert run_here("export", "run", "new", "--format", "torchscript")[0] == "new\n"
    sentences = Path("texts/validation.source").read_text(encoding="utf-8").splitlines()
    for name in ("run", "bundle"):
        found = load(name).translate(sentences, n_best=1)
        for (best,), (expected_text, expected_score) in zip(found, expected[name], strict=True):
            assert best.text == expected_text
            assert best.score == pytest.approx(expected_score, abs=1e-3)
    scores = json.loads(run_here("evaluate", "run", *TEXT)[0].splitlines()[-1])
    assert scores["bleu"] == pytest.approx(expected["bleu"])
    old, new = (json.loads(Path(name, "card.json").read_text()) for name in ("bundle", "new"))
    for name in ("step", "vocabulary_size", "tokenizer_sha256", "data", "scores"):
        assert new[name] == old[name], name
