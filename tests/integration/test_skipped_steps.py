"""Steps whose gradient is not finite: skipped by all ranks alike, counted, and the end when they are too many."""

import subprocess
from pathlib import Path

import pytest
import torch

from tests.integration.runs import checkpoints, scalars, start


def broken_fit(recipe: Path, run: Path, first: int, last: int, *arguments: object) -> tuple[int, str]:
    """Exit code and standard error of a run whose last rank has no finite loss at some steps."""
    process = start(
        *("fit", "--config", recipe, "--run.folder", run, *arguments),
        module="tests.integration.breaking",
        stderr=subprocess.PIPE,
        FIRST=str(first),
        LAST=str(last),
    )
    _, said = process.communicate(timeout=300)
    return process.returncode, said.decode()


@pytest.mark.parametrize(("devices", "precision"), [(1, "32-true"), (2, "32-true"), (2, "16-mixed")])
def test_a_skipped_step_changes_nothing_but_the_count(
    recipe_file: Path, tmp_path: Path, devices: int, precision: str
) -> None:
    run = tmp_path / "run"
    options = ["--run.checkpoint_every_steps", 1, "--run.keep_last", 12, "--run.log_every_steps", 1]
    options += ["--trainer.devices", devices, "--trainer.precision", precision, "--training.gradient_clip_norm", 0.5]
    code, said = broken_fit(recipe_file, run, 5, 6, *options)
    assert code == 0, said
    states = [torch.load(path, weights_only=True) for path in checkpoints(run)]
    fourth, fifth, sixth, seventh = states[3:7]
    for skipped in (fifth, sixth):
        assert_same(skipped["state_dict"], fourth["state_dict"])
        for index, moments in skipped["optimizer_states"][0]["state"].items():
            assert_same(moments, fourth["optimizer_states"][0]["state"][index])
    moved = [not torch.equal(weight, sixth["state_dict"][name]) for name, weight in seventh["state_dict"].items()]
    assert sum(moved) > len(moved) / 2
    assert all(weight.isfinite().all() for weight in states[-1]["state_dict"].values())
    assert [state["skipped_steps"] for state in states[3:7]] == [[0, 0], [1, 1], [2, 2], [2, 0]]
    if precision == "16-mixed":  # and the scale of the loss
        assert [state["loss_scale"] for state in states[3:7]] == [[65536, 4], [32768, 0], [16384, 0], [16384, 1]]
    # Each step has a batch and a learning rate of its own all the same, and the curve has no hole that is drawn.
    assert [step for step, _ in scalars(run, "train/learning_rate")] == list(range(1, 13))
    assert [step for step, _ in scalars(run, "train/loss")] == [1, 2, 3, 4, *range(7, 13)]
    assert scalars(run, "train/skipped_steps")[-1] == (12, 2.0)


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def test_too_many_in_a_row_end_the_run(recipe_file: Path, tmp_path: Path) -> None:
    options = ["--trainer.max_steps", 100, "--run.log_every_steps", 10, "--run.checkpoint_every_steps", 5]
    code, said = broken_fit(recipe_file, tmp_path / "run", 8, 100, *options)
    assert code == 2, said
    last = said.strip().splitlines()[-1]
    assert "step 30: the last 23 steps had no finite gradient" in last
    assert "those of step 7" in last
    assert "Traceback" not in said
    # It goes on from what is there.
    code, said = broken_fit(recipe_file, tmp_path / "run", 0, 0, *options)
    assert code == 0, said
    assert "resuming from" in said
