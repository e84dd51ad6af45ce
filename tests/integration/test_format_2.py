"""What any version with format 2 has written can be used: resumed, averaged, translated with, evaluated, exported."""

import json
import tarfile
from pathlib import Path

import pytest

from data_module.files import PlainValues
from pipeline import load
from pipeline.checkpointing.run_folder import step_path
from tests.conftest import pipeline
from tests.integration.format_2.make import HERE, LAST_STEP, RESUME, run, state_after_resuming, uses


@pytest.fixture
def expected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PlainValues:
    """What the version that made the files read from them; the working folder has a copy of them."""
    with tarfile.open(HERE / "files.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return json.loads((HERE / "expected.json").read_text())


def test_a_run_is_resumed_and_averaged(expected: PlainValues) -> None:
    """Weights, their average, moments, schedule and the corpus are those of the files."""
    before = Path("run/metrics.jsonl").read_text()
    corpus = {path: path.read_bytes() for path in Path("corpus").iterdir()}
    done = pipeline(*RESUME)
    assert done.returncode == 0, done.stderr.decode()
    assert f"resuming from {step_path(Path('run'), LAST_STEP)}" in done.stderr.decode()
    assert {path: path.read_bytes() for path in Path("corpus").glob("[!.]*")} == corpus  # without the noted run
    assert Path("run/metrics.jsonl").read_text().startswith(before)
    found = state_after_resuming()
    # Another version may draw other batches.
    assert found["learning_rate"] == pytest.approx(expected["learning_rate"])
    assert found["loss"] == pytest.approx(expected["loss"], rel=0.3)
    assert found["validation_loss"] == pytest.approx(expected["validation_loss"], rel=0.05)
    assert found["second_moments"] == pytest.approx(expected["second_moments"], rel=0.3)
    [average] = run("average", "run", "--last", "2")
    assert load(average).translate("a b c d") == "A B C D"


def test_a_run_and_a_bundle_translate_and_the_run_is_exported(expected: PlainValues) -> None:
    assert run("export", "run", "new", "--format", "torchscript") == ["new"]
    found = uses()
    for name in ("run", "bundle"):
        for (text, score), (expected_text, expected_score) in zip(found[name], expected[name], strict=True):
            assert text == expected_text
            assert score == pytest.approx(expected_score, abs=1e-3)
    assert found["bleu"] == pytest.approx(expected["bleu"])
    old, new = (json.loads(Path(name, "card.json").read_text()) for name in ("bundle", "new"))
    for name in ("step", "vocabulary_size", "tokenizer_sha256", "data", "scores"):
        assert new[name] == old[name], name
