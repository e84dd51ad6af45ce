"""SIGKILL at random moments, also while a checkpoint is being written: nothing is lost."""

import json
import random
import time
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from pipeline.checkpointing.checkpoint import step_path
from pipeline.checkpointing.run_folder import STARTS, RunFolder
from pipeline.monitoring.log_files import metrics
from tests.conftest import pipeline
from tests.integration.runs import (
    accumulator,
    assert_same_state,
    checkpoints,
    descendants,
    kill,
    position,
    scalars,
    start,
    step_of,
    still_there,
    temporary_files,
)

EVERY = 6
"""Steps between checkpoints."""


@dataclass
class Victim:
    """A run that is started, killed and looked at, again and again."""

    run: Path
    command: list[object]
    chance: random.Random
    interval_seconds: float
    """From a save to the next, about."""
    size: int
    """Of a whole checkpoint, in bytes."""
    kills: int = 0
    torn: list[int] = field(default_factory=list)
    """Sizes of the temporary files whose writers were killed."""
    too_early: int = 0
    """Kills of processes that had not yet begun."""
    resumed: int = 0
    """Starts that were seen to go on from the newest checkpoint."""

    def start_and_kill(self, while_writing: bool) -> None:
        newest, begun = checkpoints(self.run)[-1:], len(starts(self.run))
        said = self.run.with_name("said")
        with said.open("w") as stderr:
            process = start(*self.command, stderr=stderr)
        ours = f".{process.pid}.tmp"
        if while_writing:
            part = self.chance.uniform(0, 0.7) * self.size
            while process.poll() is None:
                sizes = [size_of(path) for path in temporary_files(self.run) if path.name.endswith(ours)]
                # Not the first: a run that has saved nothing has nothing to lose.
                if checkpoints(self.run) and any(part < size < self.size for size in sizes):
                    break
                time.sleep(0.0005)
        elif self.chance.random() < 0.2:
            time.sleep(self.chance.uniform(0, 5))  # while it starts
        else:
            while process.poll() is None and "training:" not in said.read_text():
                time.sleep(0.01)
            self.sleep(self.chance.uniform(0, 2 * self.interval_seconds))
        assert kill(process), f"ended before it was killed: {said.read_text()}"
        self.kills += 1
        self.too_early += len(starts(self.run)) == begun
        left = {path.name: path.stat().st_size for path in temporary_files(self.run)}
        self.torn += [size for name, size in left.items() if name.endswith(ours) and 0 < size < self.size]
        if "training:" in said.read_text():
            # What the last kill left behind has gone, and the newest checkpoint was taken.
            assert all(name.endswith(ours) for name in left), left
            if newest:
                assert f"resuming from {newest[0]}\n" in said.read_text()
                self.resumed += 1
        self.look()

    def sleep(self, seconds: float) -> None:
        """Until then, or until two checkpoints more are there, so that the run does not come to its end."""
        newest = max(map(step_of, checkpoints(self.run)), default=0)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not step_path(self.run, newest + 2 * EVERY).exists():
            time.sleep(0.001)

    def look(self) -> None:
        """Whatever has a checkpoint's name is whole, and no more is lost than the steps since the last."""
        for path in (self.run / "checkpoints").glob("*.ckpt"):
            assert zipfile.ZipFile(path).testzip() is None
            assert torch.load(path, weights_only=True)["global_step"] > 0
        # Its events are cut back as it goes on: one killed twice before its first checkpoint may have no loss in them.
        events = list((self.run / "tensorboard").glob("events*"))
        logged = events and "train/loss" in accumulator(self.run).Tags()["scalars"]
        steps = [step for step, _ in scalars(self.run, "train/loss")] if logged else []
        assert steps == list(range(1, len(steps) + 1))
        newest = max(map(step_of, checkpoints(self.run)), default=0)
        assert 0 <= len(steps) - newest <= EVERY


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # it has just got its final name
        return 0


def starts(run: Path) -> list[str]:
    return (run / STARTS).read_text().splitlines() if (run / STARTS).exists() else []


def survives(recipe: Path, folder: Path, *, positions: int, steps: int, kills: int, torn: int) -> None:
    """Kill a run so many times, so many of them while it writes a checkpoint; it ends as if nothing had been."""
    seed = random.SystemRandom().randrange(1_000_000)
    print(f"kills of seed {seed}")  # shown when the test fails
    command = ["fit", "--config", recipe, "--batches.workers", 2, "--network.dropout", 0.2]
    # A large table makes a large checkpoint, and steps that are still quick.
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
        chance=random.Random(seed),
        interval_seconds=last - last_but_one,
        size=size,
    )
    plan = [True] * torn + [False] * (kills - torn)
    victim.chance.shuffle(plan)
    for while_writing in plan:
        victim.start_and_kill(while_writing)
    done = pipeline(*victim.command)
    assert done.returncode == 0, done.stderr.decode()
    assert "resuming from" in done.stderr.decode()
    print(f"{victim.kills} kills, {len(victim.torn)} in a temporary file of {size} bytes, at {sorted(victim.torn)}")
    print(f"{victim.resumed} of the killed starts had gone on from the newest checkpoint")
    assert victim.kills == kills
    assert len(victim.torn) >= torn
    assert not temporary_files(run)
    assert [path.name for path in checkpoints(run)] == [path.name for path in checkpoints(whole)]
    assert_same_state(checkpoints(run)[-1], checkpoints(whole)[-1])
    for tag in ("train/loss", "train/gradient_norm", "work/epoch", "validation/loss", "validation/bleu"):
        assert scalars(run, tag) == scalars(whole, tag), tag
    assert len(scalars(run, "train/loss")) == steps
    logged, expected = ([(line["step"], "train/loss" in line) for line in metrics(path)] for path in (run, whole))
    assert logged == expected
    for tag in accumulator(whole).Tags()["tensors"]:
        if tag.startswith("validation/"):
            found, sought = (
                [(event.step, event.tensor_proto.string_val[0]) for event in accumulator(path).Tensors(tag)]
                for path in (run, whole)
            )
            assert found == sought, tag
    summaries = [json.loads((path / "summary.json").read_text()) for path in (run, whole)]
    assert summaries[0]["starts"] == kills + 1 - victim.too_early
    # What was lost, and starting again, is no part of the steps that count.
    assert 0 < summaries[0]["goodput"] < summaries[1]["goodput"] < 1


def test_a_few_kills(recipe_file: Path, tmp_path: Path) -> None:
    survives(recipe_file, tmp_path, positions=200_000, steps=24, kills=2, torn=1)


@pytest.mark.slow
def test_twenty_kills(recipe_file: Path, tmp_path: Path) -> None:
    survives(recipe_file, tmp_path, positions=560_000, steps=150, kills=20, torn=8)
    newest = checkpoints(tmp_path / "killed")[-1]
    assert newest.stat().st_size >= 100_000_000
    assert position(torch.load(newest, weights_only=True, mmap=True))["epoch"] >= 5


@pytest.mark.parametrize("devices", [1, 2])
def test_nobody_is_left_behind(recipe_file: Path, tmp_path: Path, devices: int) -> None:
    """Ranks and loader workers of a killed process go away by themselves, and do not keep its folder from the next."""
    command = ["fit", "--config", recipe_file, "--run.folder", tmp_path / "run", "--batches.workers", 2]
    process = start(*command, "--trainer.max_steps", 1_000_000, "--trainer.devices", devices)
    while process.poll() is None and not checkpoints(tmp_path / "run"):
        time.sleep(0.05)
    children = descendants(process)
    assert len(children) >= 3 * devices - 1
    assert kill(process)
    deadline = time.monotonic() + 20
    newest = step_of(checkpoints(tmp_path / "run")[-1])
    done = pipeline(*command, "--trainer.max_steps", newest + 2)  # at once, while they may still be there
    assert done.returncode == 0, done.stderr.decode()
    while still_there(children) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not still_there(children)


def test_killed_before_it_had_written_its_recipe(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / ".lock").touch()
    (run / ".config.yaml.99.tmp").write_text("corp")
    RunFolder(run).close()
    assert [path.name for path in run.iterdir()] == [".lock"]
