"""Several ranks: what they exchange and compile, and one that has no gradient, is slow or computes in another way."""

import json
import subprocess
from pathlib import Path

import pytest
import torch

from model.training_module import TranslationModule
from pipeline.runtime.launch import node_name
from tests.conftest import ROOT, pipeline, run_here
from tests.fork_server import ForkServer
from tests.integration import changed_program
from tests.integration.changed_program import ALL_SECONDS, COUNTED_FROM, NUM_COUNTED, SLOW_SECONDS
from tests.integration.runs import checkpoints, scalars, start


def fit_changed(change: str, recipe: Path, run: Path, *options: object, **environment: str) -> list[str]:
    """Run `fit` with a change of changed_program.py; return the lines on standard error."""
    process = start(
        *("fit", "--config", recipe, "--run.folder", run, *options),
        module="tests.integration.changed_program",
        stderr=subprocess.PIPE,
        CHANGE=change,
        **ForkServer.shared().for_children,
        **environment,
    )
    _, stderr = process.communicate()
    assert process.returncode == 0, stderr.decode()
    assert "Traceback" not in stderr.decode()
    return stderr.decode().splitlines()


def test_a_skipped_step_changes_nothing_but_the_count(recipe_file: Path, tmp_path: Path) -> None:
    """On two ranks; tests/model/test_training_module.py compares one rank with a plain loop."""
    run = tmp_path / "run"
    options = ["--run.checkpoint_every_steps", 1, "--run.keep_last", 12, "--run.log_every_steps", 1]
    options += ["--trainer.devices", 2, "--trainer.precision", "16-mixed", "--training.gradient_clip_norm", 0.5]
    options += ["--training.optimizer", "muon"]
    fit_changed("nan_loss", recipe_file, run, *options, FIRST_STEP="5", LAST_STEP="6")
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


def test_too_many_skipped_steps_end_the_run(recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--trainer.max_steps", 100, "--run.log_every_steps", 10, "--run.checkpoint_every_steps", 5]
    options += ["--trainer.val_check_interval", 50]
    command = ["fit", recipe_file, "--run.folder", tmp_path / "run", *options]
    monkeypatch.setattr(TranslationModule, "losses", TranslationModule.losses)  # so that it is restored
    for name, step in (("FIRST_STEP", "8"), ("LAST_STEP", "100")):
        monkeypatch.setenv(name, step)
    changed_program.nan_loss()
    last = run_here(*command, code=2)[1].splitlines()[-1]
    assert "step 30: the last 23 steps had no finite gradient" in last
    assert "those of step 7" in last
    monkeypatch.undo()
    assert "resuming from" in run_here(*command)[1]


def test_a_step_reduces_its_gradients_once(recipe_file: Path, tmp_path: Path) -> None:
    """One all-reduce of the gradients and one of the stop flags, and no other collective. They unpickle nothing.

    They listen at 127.0.0.1 alone, so that no other machine can connect to them.
    """
    # Several micro-batches per rank and step; all parameters fit into one bucket.
    options = ["--batches.max_tokens_per_device", 100, "--trainer.devices", 2]
    options += ["--run.log_every_steps", 100, "--run.checkpoint_every_steps", 100, "--trainer.val_check_interval", 100]
    options += ["--trainer.max_steps", COUNTED_FROM + NUM_COUNTED + 1]
    fit_changed("count_collectives", recipe_file, tmp_path / "run", *options, COUNTS=str(tmp_path))
    for rank in (0, 1):
        counts = json.loads((tmp_path / f"{rank}.json").read_text())
        # The stop flag is one byte, reduced asynchronously in a process group of its own.
        assert counts["called"] == {"torch.uint8": NUM_COUNTED}
        assert counts["ran"] == {"gloo:all_reduce": 2 * NUM_COUNTED}
        assert set(counts["listens"]) == {"0100007F"}


@pytest.mark.slow
def test_ranks_compile_once_at_the_start(recipe_file: Path, tmp_path: Path) -> None:
    """One graph a rank. DDP splits it at its buckets, so that some gradients are reduced while others are computed."""
    options = ["--trainer.devices", 2, "--trainer.max_steps", 6, "--trainer.val_check_interval", 100]
    options += ["--trainer.precision", "bf16-mixed", "--network.num_layers", 2, "--network.dropout", 0.1]
    options += ["--network.d_model", 128, "--network.d_ff", 512, "--network.num_heads", 4]
    options += ["--batches.batch_tokens", 800, "--batches.max_tokens_per_device", 300]
    fit_changed("compile_network", recipe_file, tmp_path / "run", *options, COUNTS=str(tmp_path))
    one, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    for rank in (one, other):
        before, after = rank["counts"]
        assert before == after
        compilations, graphs, parts = before
        assert compilations >= graphs == 1
        assert parts > 1
    assert one["gradients"] != other["gradients"]  # of the rehearsal: they are not reduced
    assert one["weights"] == other["weights"]


@pytest.mark.slow
def test_a_rank_with_another_backend_is_named_and_trains_the_same(recipe_file: Path, tmp_path: Path) -> None:
    options = ["--trainer.devices", 2, "--trainer.max_steps", 4, "--run.log_every_steps", 1]
    options += ["--batches.max_tokens_per_device", 100]
    plain, run = tmp_path / "plain", tmp_path / "run"
    done = pipeline("fit", "--config", recipe_file, "--run.folder", plain, *options)
    assert done.returncode == 0, done.stderr.decode()
    assert b"another backend" not in done.stderr
    said = fit_changed("other_backend", recipe_file, run, *options)
    assert "computed by the other backend" in said
    assert [line for line in said if line.startswith("another backend")] == [
        f"another backend than rank 0's on rank 1 on {node_name()}: attention flash, not plain (no compiler)"
        "; results agree up to rounding, and all ranks wait for the slowest one"
    ]
    for tag in ("train/gradient_norm", "train/loss"):
        expected = scalars(plain, tag)
        assert len(expected) == 4
        assert scalars(run, tag) == [(step, pytest.approx(value, rel=1e-4)) for step, value in expected]


STEPS, EVERY = 130, 10


def test_a_slow_rank_is_named_once(recipe_file: Path, tmp_path: Path) -> None:
    """Under DDP all ranks' steps take equally long: they wait for the slow one. The curves show it."""
    run = tmp_path / "run"
    options = ["--trainer.max_steps", STEPS, "--trainer.val_check_interval", STEPS, "--trainer.devices", 3]
    options += ["--run.log_every_steps", EVERY, "--run.checkpoint_every_steps", STEPS]
    # Several micro-batches per rank and step.
    options += ["--batches.max_tokens_per_device", 100]
    said = fit_changed("slow_rank", recipe_file, run, *options, SLOW_RANK="2")
    own = ALL_SECONDS + 2 * SLOW_SECONDS
    assert [line for line in said if "has been slow" in line] == [
        f"rank 2 on {node_name()} has been slow for 100 steps, and the others wait for it: its own part of a step "
        f"takes {own:.3g} s, {100 * (own / ALL_SECONDS - 1):.0f} % more than the median rank's"
    ]
    # A point is of the interval before its own, so the first one has none. The last step's loop is in the next one.
    steps = list(range(2 * EVERY, STEPS + 1, EVERY))
    ratios = [own / ALL_SECONDS] * len(steps)
    ratios[0] -= SLOW_SECONDS / EVERY / ALL_SECONDS
    assert scalars(run, "train_perf/slowest_rank") == [(step, 2.0) for step in steps]
    curve = scalars(run, "train_perf/slowest_rank_over_median")
    assert curve == [(step, pytest.approx(ratio)) for step, ratio in zip(steps, ratios, strict=True)]
    # Of rank 0, which waits.
    for name, seconds in (("", own), ("_communication_wait", 2 * SLOW_SECONDS)):
        assert dict(scalars(run, f"train_perf/step_seconds{name}"))[STEPS] == pytest.approx(seconds)


@pytest.mark.slow
def test_ranks_with_other_packages_are_refused(recipe_file: Path, tmp_path: Path) -> None:
    """Rank 1 lacks MeCab."""
    hidden = "import os, sys\nif os.environ.get('LOCAL_RANK') == '1':\n    sys.modules['MeCab'] = None\n"
    (tmp_path / "sitecustomize.py").write_text(hidden)
    options = ["--run.folder", tmp_path / "run", "--trainer.devices", 2, "--run.timeout_seconds", 200]
    options += ["--corpus.target_language", "ja", "--corpus.folder", tmp_path / "corpus"]
    done = pipeline("fit", recipe_file, *options, environment={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert done.returncode == 2, done.stderr.decode()
    assert b" was started otherwise than rank 0: BLEU's tokenizer char, not ja-mecab; start all ranks" in done.stderr
    assert not checkpoints(tmp_path / "run")


def test_a_single_rank_is_compared_with_none(trained_run: Path) -> None:
    metrics = (trained_run / "metrics.jsonl").read_text()
    assert "slowest_rank" not in metrics
    assert "communication_wait" not in metrics
