"""Validation text of two languages: each has its scores, which are those of `evaluate`, on one rank and on two."""

import json
from pathlib import Path

import pytest

from pipeline import load
from pipeline.checkpointing.run_folder import read_metrics
from tests.conftest import pipeline, run_here
from tests.integration.runs import checkpoints, scalars


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_each_language_has_its_scores(
    recipe_file: Path, trained_run: Path, tiny_corpus: Path, tmp_path: Path, devices: int
) -> None:
    """Those of both together are the trained run's, whose weights a step does not change at a learning rate of 0."""
    texts, pairs = [], {}
    sides = [(tiny_corpus.parent / f"validation.{side}").read_text().splitlines() for side in ("source", "target")]
    for name, part in (("de", slice(24)), ("fr", slice(24, None))):
        pairs[name] = [lines[part] for lines in sides]
        files = {side: str(tmp_path / f"{name}.{side}") for side in ("source", "target")}
        for file, lines in zip(files.values(), pairs[name], strict=True):
            Path(file).write_text("".join(f"{line}\n" for line in lines))
        texts.append({**files, "name": name})
    words = ["fit", recipe_file, "--run.folder", tmp_path / "run", "--corpus.folder", tmp_path / "corpus"]
    words += [f"--corpus.validation={json.dumps(texts)}", "--init-from", trained_run / "checkpoints/step=00000240.ckpt"]
    words += ["--training.learning_rate_factor", 0, "--trainer.max_steps", 1, "--trainer.val_check_interval", 1]
    words += ["--decoding.max_extra_tokens", 50, "--trainer.devices", devices]
    done = pipeline(*words) if devices > 1 else run_here(*words)
    assert devices == 1 or done.returncode == 0, done
    [logged] = [line for line in read_metrics(tmp_path / "run") if "validation/bleu" in line]
    for name in ("bleu", "chrf", "exact_match", "loss", "negative_log_likelihood"):
        whole = scalars(trained_run, f"validation/{name}")[-1][1]
        assert logged[f"validation/{name}"] == pytest.approx(whole, rel=1e-5)
        one, other = sorted(logged[f"validation/{name}/{language}"] for language in pairs)
        if name in ("loss", "negative_log_likelihood"):  # means over tokens
            assert one < whole < other
    [newest] = checkpoints(tmp_path / "run")
    model = load(newest)
    for name, (sources, targets) in pairs.items():
        text = ["--source", tmp_path / f"{name}.source", "--reference", tmp_path / f"{name}.target", "--beam", 1]
        figures = json.loads(run_here("evaluate", newest, *text)[0].splitlines()[-1])
        for score in ("bleu", "chrf", "exact_match"):
            assert figures[score] == pytest.approx(logged[f"validation/{score}/{name}"], abs=1e-3)
        scored = model.score(sources, targets)
        likelihood = sum(one.log_probability for one in scored) / sum(one.num_tokens for one in scored)
        assert logged[f"validation/negative_log_likelihood/{name}"] == pytest.approx(-likelihood, rel=1e-4)
