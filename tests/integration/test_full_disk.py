"""A full disk: an error without a partial checkpoint while a run saves, and a warning while it logs."""

import json
import os
import resource
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml

from pipeline.checkpointing.run_folder import read_metrics
from pipeline.config.recipe import load_recipe
from tests.conftest import run_here
from tests.integration.runs import assert_ended, checkpoints, descendants, scalars, start, step_of, temporary_files

MEGABYTE = 1_000_000


class SmallDisk:
    """A file system of 100 MB, or a limit on file sizes where mounting is not permitted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=100m", "none", str(folder)]
        self.mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
        self._filler = folder / "filler"
        self._stderr = folder.with_name("stderr")

    def start(self, *command: object, until: str = "checkpoints/step=*.ckpt") -> None:
        """Start a command and wait for a file in `run`, by default its first checkpoint."""
        with self._stderr.open("w") as stderr:
            self.process = start(*command, stderr=stderr)
        while not list((self.folder / "run").glob(until)) and self.process.poll() is None:
            time.sleep(0.001)
        self.children = descendants(self.process)

    def fill(self, leave: int) -> None:
        if not self.mounted:
            limit = max(leave, 30_000)  # enough for its stderr, but not for its curves
            resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            return
        # Take half of the free space at a time. A failed allocation is released again, so that taking all at once would
        # make the disk alternate between full and free whenever the command writes.
        with self._filler.open("wb") as file:
            allocated = 0
            while True:
                disk = os.statvfs(self.folder)
                free = disk.f_bavail * disk.f_frsize - leave
                if free < disk.f_frsize:
                    return
                size = max(free // 2 // disk.f_frsize, 1) * disk.f_frsize
                with suppress(OSError):  # the command has used the space
                    os.posix_fallocate(file.fileno(), allocated, size)
                    allocated += size

    def stderr(self) -> str:
        return self._stderr.read_text()

    def wait_for(self, text: str) -> None:
        """Wait until its standard error contains a text, and at least 0.1 s; the command must not end before."""
        time.sleep(0.1)
        while text not in self.stderr():
            assert self.process.poll() is None, self.stderr()
            time.sleep(0.05)

    def free_space(self) -> None:
        self._filler.unlink(missing_ok=True)
        if not self.mounted and self.process.poll() is None:
            resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def error_line(self) -> str:
        """Wait until the full disk ends the command and all its processes; return its line of error."""
        assert self.process.wait() == 2, self._stderr.read_text()
        assert_ended(self.children)
        stderr = self._stderr.read_text()
        assert "Traceback" not in stderr
        [line] = [line for line in stderr.splitlines() if line.startswith("error: ")]
        assert line == stderr.splitlines()[-1]
        return line

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.mounted:
            subprocess.run(["umount", "--lazy", str(self.folder)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    small_disk = SmallDisk(tmp_path / "disk")
    yield small_disk
    small_disk.close()


def test_disk_full_while_saving_a_checkpoint(disk: SmallDisk, recipe_file: Path) -> None:
    """test_checkpoint_callback.py has a last write that fails; test_graceful_stop.py, a rank that fails."""
    run = disk.folder / "run"
    command = ["fit", "--config", recipe_file, "--run.folder", run, "--run.keep_last", 1]
    command += ["--network.learned_positions", "true", "--network.max_positions", 200_000]
    command += ["--trainer.val_check_interval", 1000, "--batches.workers", 1]
    disk.start(*command, "--trainer.max_steps", 100_000)
    disk.fill(20 * MEGABYTE)
    line = disk.error_line()
    [kept] = checkpoints(run)
    failed = f"step={step_of(kept) + 4:08d}.ckpt"
    assert line.startswith(f"error: {run / 'checkpoints' / failed}: ")
    assert line.endswith("; make room, then run the same command again")
    assert not temporary_files(run)
    assert torch.load(kept, weights_only=True)["global_step"] == step_of(kept)
    disk.free_space()
    assert f"resuming from {kept}" in run_here(*command, "--trainer.max_steps", step_of(kept) + 2)[1]
    assert [step_of(path) for path in checkpoints(run)] == [step_of(kept) + 2]


@pytest.mark.slow
def test_disk_full_while_logging(disk: SmallDisk, recipe_file: Path) -> None:
    """One warning of two ranks; training goes on, and so do the curves when there is room again."""
    run = disk.folder / "run"
    command = ["fit", "--config", recipe_file, "--run.folder", run, "--run.checkpoint_every_steps", 1_000_000]
    command += ["--trainer.val_check_interval", 10_000, "--run.log_every_steps", 1, "--trainer.devices", 2]
    disk.start(*command, "--trainer.max_steps", 1_000_000, until="metrics.jsonl")
    disk.fill(0)
    disk.wait_for("training continues without this log until it can be written")
    reached = last_step(run)
    time.sleep(3)
    disk.free_space()
    while last_step(run) == reached:
        disk.wait_for("training")
    disk.process.terminate()
    assert disk.process.wait() == 75, disk.stderr()
    assert_ended(disk.children)
    assert disk.stderr().count("asked to stop: saved after step ") == 1
    assert disk.stderr().count("warning: ") == 1
    assert "Traceback" not in disk.stderr()
    steps = [line["step"] for line in read_metrics(run)]
    assert steps == sorted(steps)
    assert max(later - earlier for earlier, later in pairwise(steps)) > 5  # training continued without logging
    # On a full disk there may still be room in the last block of one log, for some more steps.
    assert {step for step, _ in scalars(run, "train/loss")} <= {*steps, *range(reached + 1, reached + 20)}
    assert step_of(checkpoints(run)[-1]) == steps[-1]


def last_step(run: Path) -> int:
    return max(line["step"] for line in read_metrics(run))


def test_a_log_folder_that_is_read_only(tmp_path: Path, recipe_file: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    # Nothing can be created below a file, even by root.
    (run / "tensorboard").touch()
    (run / "config.yaml").write_text(yaml.safe_dump(load_recipe([recipe_file]).as_dict()))
    _, said = run_here("fit", recipe_file, "--run.folder", run)
    [warning] = [line for line in said.splitlines() if line.startswith("warning: ")]
    assert warning.startswith(f"warning: {run}/tensorboard")
    assert [line["step"] for line in read_metrics(run) if "train/loss" in line] == [2, 4, 6, 8, 10, 12]
    assert json.loads((run / "summary.json").read_text())["step"] == 12
