"""`average --best`: which checkpoints it averages, what it writes, and what it refuses."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from data_module.system.files import PlainValues
from pipeline.checkpointing.checkpoint import read_checkpoint, resolve_checkpoint, write_atomic
from pipeline.checkpointing.run_folder import around_best_path, step_checkpoints, step_of, step_path
from pipeline.commands import averaging as command
from pipeline.metrics.metrics import METRICS, ExactMatch
from pipeline.monitoring.run_metadata import final_metrics
from tests.conftest import refusal, run_here

EVERY = 20


class WordErrors(ExactMatch):
    """A metric whose lowest score is the best."""

    higher_is_better = False


@pytest.fixture(scope="module")
def ten_checkpoints(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with ten checkpoints of different weights and no scores."""
    run = tmp_path_factory.mktemp("best-average") / "run"
    shutil.copytree(trained_run, run, ignore=shutil.ignore_patterns("checkpoints", "metrics.jsonl"))
    contents = torch.load(step_checkpoints(trained_run)[-1], weights_only=True)
    generator = torch.Generator().manual_seed(1)
    for step in range(EVERY, 11 * EVERY, EVERY):
        for tensor in contents["state_dict"].values():
            tensor += torch.randn(tensor.shape, generator=generator)
        write_atomic({**contents, "global_step": step}, step_path(run, step))
    return run


@pytest.fixture
def run(ten_checkpoints: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(ten_checkpoints, tmp_path / "run"))


def log_scores(run: Path, bleu: Mapping[int, float | None]) -> None:
    lines = [{"step": step, "time": 0.0, "validation/bleu": score} for step, score in bleu.items()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def best(run: Path, count: int) -> PlainValues:
    """Run the command and return what the average says about the choice."""
    run_here("average", run, "--best", count)
    return read_checkpoint(run / f"average-best-{count}.ckpt").contents["selection"]


def move_to_around_best(run: Path, paths: list[Path]) -> None:
    """Move checkpoints as `fit` does when they are no longer among the newest."""
    for path in paths:
        target = around_best_path(run, step_of(path))
        target.parent.mkdir(exist_ok=True)
        path.rename(target)


@pytest.mark.parametrize(
    ("best_step", "count", "expected"),
    [(4, 3, [3, 4, 5]), (4, 2, [4, 5]), (1, 3, [1, 2, 3]), (10, 3, [8, 9, 10]), (4.5, 1, [5]), (2, 10, range(1, 11))],
)
def test_the_checkpoints_around_the_best_validation_are_averaged(
    run: Path, best_step: float, count: int, expected: list[int]
) -> None:
    best_step = int(best_step * EVERY)
    log_scores(run, {EVERY: 3.0, best_step: 9.25, 10 * EVERY + 1: 8.0})
    printed, said = run_here("average", run, "--best", count)
    path = run / f"average-best-{count}.ckpt"
    written = read_checkpoint(path).contents
    steps = [EVERY * number for number in expected]
    assert written["selection"] == {
        "option": f"--best {count}",
        "run_step": 10 * EVERY,
        "best_validation": {"step": best_step, "bleu": 9.25},
        "steps": steps,
    }
    assert written["averaged"] == [f"step={step:08d}.ckpt" for step in steps]
    assert printed == f"{path}\n"
    assert said == f"best validation: step {best_step}: BLEU 9.25\naveraged {', '.join(written['averaged'])}\n"


def test_the_first_of_equal_validations_is_the_best(run: Path) -> None:
    log_scores(run, {2 * EVERY: 49.0, 3 * EVERY: 50.0, 8 * EVERY: 50.0})
    # A killed run may leave a part of a line.
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 41, "validat')
    record = best(run, 3)
    assert record["best_validation"] == {"step": 3 * EVERY, "bleu": 50.0}
    assert record["steps"] == [2 * EVERY, 3 * EVERY, 4 * EVERY]


@pytest.mark.parametrize(
    ("best_by", "tag", "scores"),
    [
        ("word_error_rate", "validation/word_error_rate", {2: 2.0, 4: 0.0, 6: 2.0}),
        ("likelihood", "validation/negative_log_likelihood", {2: 1.5, 4: 1.25, 6: 1.2504}),
    ],
)
def test_another_score_chooses_where_the_run_says_so(
    run: Path, best_by: str, tag: str, scores: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["run"]["best_by"] = best_by
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    lines = [json.dumps({"step": step * EVERY, "validation/bleu": step, tag: score}) for step, score in scores.items()]
    (run / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    if best_by != "likelihood":
        assert "run.best_by 'word_error_rate' is not registered" in refusal("average", run, "--best", 1)
        monkeypatch.setitem(METRICS, best_by, WordErrors())
    assert best(run, 1)["best_validation"] == {"step": 4 * EVERY, best_by: scores[4]}
    assert final_metrics(SimpleNamespace(run=run), best_by)["best_validation"]["step"] == 4 * EVERY  # type: ignore[arg-type]


def test_scores_that_were_not_finite_are_left_out(run: Path) -> None:
    """They are null in metrics.jsonl, also for what summary.json says."""
    log_scores(run, {EVERY: None, 2 * EVERY: 3.0, 3 * EVERY: None})
    assert best(run, 1)["best_validation"] == {"step": 2 * EVERY, "bleu": 3.0}
    log = SimpleNamespace(run=run)
    assert final_metrics(log, "bleu")["best_validation"]["step"] == 2 * EVERY


def test_the_best_checkpoint_counts_if_its_step_was_not_saved(run: Path) -> None:
    contents = torch.load(step_checkpoints(run)[7], weights_only=True)
    write_atomic({**contents, "global_step": 77}, run / "checkpoints" / "best.ckpt")
    log_scores(run, {77: 50.0})
    assert best(run, 3)["steps"] == [3 * EVERY, 77, 4 * EVERY]
    assert read_checkpoint(run / "average-best-3.ckpt").contents["averaged"][1] == "best.ckpt"
    # A step that was saved is not listed twice, and goes by its own name.
    write_atomic({**contents, "global_step": 10 * EVERY}, run / "checkpoints" / "best.ckpt")
    log_scores(run, {10 * EVERY: 50.0})
    best(run, 1)
    assert read_checkpoint(run / "average-best-1.ckpt").contents["averaged"] == ["step=00000200.ckpt"]


def test_checkpoints_that_are_no_longer_among_the_newest_are_used(run: Path) -> None:
    newest = step_checkpoints(run)[-1]
    newest.write_bytes(newest.read_bytes()[:-1000])
    move_to_around_best(run, step_checkpoints(run)[:6])
    log_scores(run, {3 * EVERY: 50.0})
    assert best(run, 9)["steps"] == [EVERY * number for number in range(1, 10)]
    assert "has 9 valid checkpoints, --best is 10; give --best 9 or less" in refusal(
        "average", run, "--best", 10
    )  # one is incomplete
    refusal("average", run, "--last", 5)


def test_files_that_fit_moves_removes_or_replaces_meanwhile(run: Path) -> None:
    saved = command.saved_checkpoints(run)
    expected = {step: one.weights["embedding.weight"].clone() for step, one in saved.items()}
    first, second, *others = step_checkpoints(run)
    move_to_around_best(run, [first])
    second.unlink()
    for path in others:
        shutil.copy(around_best_path(run, EVERY), path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)
    assert all(torch.equal(one.weights["embedding.weight"], expected[step]) for step, one in saved.items())


def test_the_average_is_used_until_the_run_goes_on(run: Path) -> None:
    log_scores(run, {3 * EVERY: 50.0})
    record = best(run, 2)
    assert max(record["steps"]) < record["run_step"]
    assert resolve_checkpoint(run).name == "average-best-2.ckpt"
    shutil.copy(step_path(run, 10 * EVERY), step_path(run, 10 * EVERY + 1))
    assert resolve_checkpoint(run) == step_path(run, 10 * EVERY + 1)


def test_a_run_without_validation_scores_is_refused(run: Path) -> None:
    (run / "metrics.jsonl").write_text('{"step": 1, "time": 0.0, "train/loss": 1.0}\n')
    said = "metrics.jsonl has no validation scores to choose checkpoints by; give --last N"
    assert said in refusal("average", run, "--best", 2)
    (run / "metrics.jsonl").unlink()
    assert said in refusal("average", run, "--best", 2)
