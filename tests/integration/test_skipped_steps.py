"""Steps without a finite gradient are skipped by all ranks and counted; too many in a row end the run."""

import subprocess
from pathlib import Path

import torch

from tests.integration.runs import checkpoints, scalars, start


def fit_with_nan_loss(recipe: Path, run: Path, first: int, last: int, *arguments: object) -> tuple[int, str]:
    """Train with a NaN loss on the last rank from step `first` to step `last`; return the exit code and stderr."""
    process = start(
        *("fit", "--config", recipe, "--run.folder", run, *arguments),
        module="tests.integration.changed_program",
        CHANGE="nan_loss",
        stderr=subprocess.PIPE,
        FIRST_STEP=str(first),
        LAST_STEP=str(last),
    )
    _, stderr = process.communicate(timeout=300)
    return process.returncode, stderr.decode()


def test_a_skipped_step_changes_nothing_but_the_count(recipe_file: Path, tmp_path: Path) -> None:
    """On two ranks; tests/model/test_training_module.py compares one rank with a plain loop."""
    run = tmp_path / "run"
    options = ["--run.checkpoint_every_steps", 1, "--run.keep_last", 12, "--run.log_every_steps", 1]
    options += ["--trainer.devices", 2, "--trainer.precision", "16-mixed", "--training.gradient_clip_norm", 0.5]
    options += ["--training.optimizer", "muon"]
    code, stderr = fit_with_nan_loss(recipe_file, run, 5, 6, *options)
    assert code == 0, stderr
    states = [torch.load(path, weights_only=True) for path in checkpoints(run)]
    fourth, fifth, sixth, seventh = states[3:7]
    for skipped in (fifth, sixth):
        assert_same(skipped["state_dict"], fourth["state_dict"])
        for index, moments in skipped["optimizer_states"][0]["state"].items():
            assert_same(moments, fourth["optimizer_states"][0]["state"][index])
    is_changed = [not torch.equal(weight, sixth["state_dict"][name]) for name, weight in seventh["state_dict"].items()]
    assert sum(is_changed) > len(is_changed) / 2
    assert all(weight.isfinite().all() for weight in states[-1]["state_dict"].values())
    assert [state["skipped_steps"] for state in states[3:7]] == [[0, 0], [1, 1], [2, 2], [2, 0]]
    # Loss scale, and steps since it has changed.
    assert [state["loss_scale"] for state in states[3:7]] == [[65536, 4], [32768, 0], [16384, 0], [16384, 1]]
    # Skipped steps count for batches and the learning rate, but have no loss.
    assert [step for step, _ in scalars(run, "train/learning_rate")] == list(range(1, 13))
    assert [step for step, _ in scalars(run, "train/loss")] == [1, 2, 3, 4, *range(7, 13)]
    assert scalars(run, "train/skipped_steps")[-1] == (12, 2.0)


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def test_too_many_skipped_steps_end_the_run(recipe_file: Path, tmp_path: Path) -> None:
    options = ["--trainer.max_steps", 100, "--run.log_every_steps", 10, "--run.checkpoint_every_steps", 5]
    options += ["--trainer.val_check_interval", 50]
    code, stderr = fit_with_nan_loss(recipe_file, tmp_path / "run", 8, 100, *options)
    assert code == 2, stderr
    last_line = stderr.strip().splitlines()[-1]
    assert "step 30: the last 23 steps had no finite gradient" in last_line
    assert "those of step 7" in last_line
    assert "Traceback" not in stderr
    # The run can be resumed.
    code, stderr = fit_with_nan_loss(recipe_file, tmp_path / "run", 0, 0, *options)
    assert code == 0, stderr
    assert "resuming from" in stderr
