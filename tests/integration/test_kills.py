"""SIGKILL at random times, also while a checkpoint is written: training resumes and ends with the same result.

Bit for bit, with all regularization, Muon and bfloat16.
"""

import json
import random
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from pipeline.checkpointing.run_folder import STARTS, read_metrics
from tests.conftest import pipeline
from tests.integration.runs import (
    accumulator,
    assert_ended,
    assert_same_state,
    checkpoints,
    descendants,
    held,
    kill,
    position,
    scalars,
    start,
    step_of,
    temporary_files,
)

EVERY = 6
"""Steps between checkpoints."""


@dataclass
class Victim:
    """A run that is started, killed and checked repeatedly."""

    run: Path
    command: list[object]
    rng: random.Random
    interval_seconds: float
    """Approximate time between two checkpoints."""
    size: int
    """Size of a complete checkpoint in bytes."""
    last: int
    """The last step."""
    too_early: int = 0
    """Number of kills before the start was recorded in the run folder."""

    def start_and_kill(self, while_writing: bool) -> None:
        newest, num_starts = checkpoints(self.run)[-1:], len(starts(self.run))
        log, num_bytes = self.run.with_name("stderr"), self.rng.randrange(1, self.size // 2)
        # The process waits to be killed: in the write, or after two more checkpoints, so that the run does not end.
        change = {"CHANGE": "partial_write", "BYTES": str(num_bytes)}
        if not while_writing:
            change = held(min(2 * EVERY, self.last - 1 - sum(map(step_of, newest))))
        with log.open("w") as stderr:
            process = start(*self.command, module="tests.integration.changed_program", stderr=stderr, **change)
        suffix = f".{process.pid}.tmp"
        if while_writing:
            while process.poll() is None and num_bytes not in self.sizes(suffix):
                time.sleep(0.01)
        elif self.rng.random() < 0.2:
            time.sleep(self.rng.uniform(0, 5))  # during start-up
        else:
            while process.poll() is None and "training:" not in log.read_text():
                time.sleep(0.01)
            time.sleep(self.rng.uniform(0, 2 * self.interval_seconds))
        assert kill(process), f"ended before it was killed: {log.read_text()}"
        self.too_early += len(starts(self.run)) == num_starts
        assert not while_writing or self.sizes(suffix) == [num_bytes]
        if "training:" in log.read_text():
            # The leftovers of the previous kill were removed, and the run resumed from the newest checkpoint.
            assert len(self.sizes(suffix)) == len(temporary_files(self.run))
            if newest:
                assert f"resuming from {newest[0]}\n" in log.read_text()
        self.check_files()

    def sizes(self, suffix: str) -> list[int]:
        """Return the sizes of the temporary files with this suffix."""
        return [size_of(path) for path in temporary_files(self.run) if path.name.endswith(suffix)]

    def check_files(self) -> None:
        """Check that all checkpoints are complete, and that at most the steps since the newest one are lost.

        They are more than the steps between two while the next one is being written, but less than twice as many: a
        checkpoint that is due waits for the one before.
        """
        for path in (self.run / "checkpoints").glob("*.ckpt"):
            assert zipfile.ZipFile(path).testzip() is None
            assert torch.load(path, weights_only=True)["global_step"] > 0
        # Resuming truncates the events, so a run killed twice before its first checkpoint may have no loss in them.
        events = list((self.run / "tensorboard").glob("events*"))
        logged = events and "train/loss" in accumulator(self.run).Tags()["scalars"]
        steps = [step for step, _ in scalars(self.run, "train/loss")] if logged else []
        assert steps == list(range(1, len(steps) + 1))
        newest = max(map(step_of, checkpoints(self.run)), default=0)
        assert 0 <= len(steps) - newest <= 2 * EVERY


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # it was renamed to its final name
        return 0


def starts(run: Path) -> list[str]:
    return (run / STARTS).read_text().splitlines() if (run / STARTS).exists() else []


def check_kills(recipe: Path, folder: Path, *, positions: int, steps: int, kills: int, while_writing: int) -> None:
    """Compare a run that is killed repeatedly, `while_writing` times during a checkpoint, with an uninterrupted run."""
    seed = random.SystemRandom().randrange(1_000_000)
    print(f"seed of the kills: {seed}")  # shown when the test fails
    command = ["fit", "--config", recipe, "--batches.workers", 2, "--trainer.precision", "bf16-mixed"]
    command += ["--network.dropout", 0.2, "--network.attention_dropout", 0.2, "--network.activation_dropout", 0.1]
    command += ["--training.r_drop_alpha", 5, "--training.weight_decay", 0.1, "--training.ema_decay", 0.9]
    command += ["--training.optimizer", "muon", "--training.schedule", "cosine", "--training.peak_learning_rate", 0.01]
    # A large position table makes checkpoints large and leaves steps fast.
    command += ["--network.learned_positions", "true", "--network.max_positions", positions]
    command += ["--run.checkpoint_every_steps", EVERY, "--run.log_every_steps", 1, "--run.keep_last", 2]
    command += ["--trainer.max_steps", steps, "--trainer.val_check_interval", 2 * EVERY]
    whole, run = folder / "whole", folder / "killed"
    done = pipeline(*command, "--run.folder", whole)
    assert done.returncode == 0, done.stderr.decode()
    last_but_one, last = (path.stat().st_mtime for path in checkpoints(whole))
    size = min(path.stat().st_size for path in checkpoints(whole))
    victim = Victim(
        run=run,
        command=[*command, "--run.folder", run],
        rng=random.Random(seed),
        interval_seconds=last - last_but_one,
        size=size,
        last=steps,
    )
    plan = [True] * while_writing + [False] * (kills - while_writing)
    victim.rng.shuffle(plan)
    for is_writing in plan:
        victim.start_and_kill(while_writing=is_writing)
    done = pipeline(*victim.command)
    assert done.returncode == 0, done.stderr.decode()
    assert "resuming from" in done.stderr.decode()
    assert not temporary_files(run)
    assert [path.name for path in checkpoints(run)] == [path.name for path in checkpoints(whole)]
    assert_same_state(checkpoints(run)[-1], checkpoints(whole)[-1])
    for tag in ("train/loss", "train/gradient_norm", "train_perf/epoch", "validation/loss", "validation/bleu"):
        assert scalars(run, tag) == scalars(whole, tag), tag
    assert len(scalars(run, "train/loss")) == steps
    logged, expected = ([(line["step"], "train/loss" in line) for line in read_metrics(path)] for path in (run, whole))
    assert logged == expected
    for tag in accumulator(whole).Tags()["tensors"]:
        if tag.startswith("validation/"):
            texts, expected_texts = (
                [(event.step, event.tensor_proto.string_val[0]) for event in accumulator(path).Tensors(tag)]
                for path in (run, whole)
            )
            assert texts == expected_texts, tag
    summary = json.loads((run / "summary.json").read_text())
    assert summary["starts"] == kills + 1 - victim.too_early
    pages = accumulator(run).Tensors("run/recipe/text_summary")
    assert {page.step % EVERY for page in pages} == {1}  # after a checkpoint
    # The steps of all starts count towards goodput.
    seconds = summary["seconds_since_submission"]
    steps_seconds = sum(line.get("train_perf/step_seconds", 0.0) for line in read_metrics(run))
    assert 0 < 0.99 * steps_seconds <= summary["goodput"] * seconds < seconds


def test_a_kill_while_a_checkpoint_is_written(recipe_file: Path, tmp_path: Path) -> None:
    check_kills(recipe_file, tmp_path, positions=200_000, steps=36, kills=1, while_writing=1)


@pytest.mark.slow
def test_ten_kills(recipe_file: Path, tmp_path: Path) -> None:
    check_kills(recipe_file, tmp_path, positions=400_000, steps=90, kills=10, while_writing=4)
    newest = checkpoints(tmp_path / "killed")[-1]
    assert newest.stat().st_size >= 100_000_000
    assert position(torch.load(newest, weights_only=True, mmap=True))["epoch"] >= 3


def test_child_processes_of_a_killed_run_end(recipe_file: Path, tmp_path: Path) -> None:
    """Ranks and loader workers of a killed process end by themselves, and do not block the next start."""
    command = ["fit", "--config", recipe_file, "--run.folder", tmp_path / "run", "--batches.workers", 2]
    process = start(*command, "--trainer.max_steps", 1_000_000, "--trainer.devices", 2)
    while process.poll() is None and not checkpoints(tmp_path / "run"):
        time.sleep(0.05)
    children = descendants(process)
    assert len(children) >= 5  # a rank and two workers of each
    assert kill(process)
    newest = step_of(checkpoints(tmp_path / "run")[-1])
    done = pipeline(*command, "--trainer.max_steps", newest + 2)  # immediately, while they may still run
    assert done.returncode == 0, done.stderr.decode()
    assert_ended(children)
