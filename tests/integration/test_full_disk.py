"""A disk that is full while a run saves or logs: one line, nothing torn, and the next start goes on."""

import os
import resource
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.conftest import pipeline
from tests.integration.runs import checkpoints, descendants, start, step_of, still_there, temporary_files

MEGABYTE = 1_000_000


class SmallDisk:
    """A file system of its own; where none may be mounted, a limit to the files of a process stands in for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=100m", "none", str(folder)]
        self.mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
        self._filler = folder / "filler"
        self._said = folder.with_name("said")

    def start(self, *command: object) -> None:
        """Start a command that writes here, and wait for its first checkpoint in `run`."""
        with self._said.open("w") as stderr:
            self.process = start(*command, stderr=stderr)
        while not checkpoints(self.folder / "run") and self.process.poll() is None:
            time.sleep(0.001)
        self.children = descendants(self.process)

    def fill(self, leave: int) -> None:
        """Leave so many bytes of room."""
        if not self.mounted:
            limit = max(leave, 30_000)  # so that what it says finds room, but not its curves
            resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (limit, limit))
            return
        with self._filler.open("wb") as file:
            while True:
                room = os.statvfs(self.folder)
                try:
                    os.posix_fallocate(file.fileno(), 0, room.f_bavail * room.f_frsize - leave)
                    return
                except OSError:  # the command was quicker
                    continue

    def make_room(self) -> None:
        self._filler.unlink(missing_ok=True)

    def line(self) -> str:
        """The one line of the command that a full disk has ended; nobody is left of it, promptly."""
        deadline = time.monotonic() + 20
        assert self.process.wait(20) == 2, self._said.read_text()
        while still_there(self.children) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not still_there(self.children)
        said = self._said.read_text()
        assert "Traceback" not in said
        [line] = [line for line in said.splitlines() if line.startswith("error: ")]
        assert line == said.splitlines()[-1]
        return line

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.mounted:
            subprocess.run(["umount", "--lazy", str(self.folder)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    small = SmallDisk(tmp_path / "disk")
    yield small
    small.close()


@pytest.mark.parametrize("devices", [1, 2])
def test_no_room_for_a_checkpoint(disk: SmallDisk, recipe_file: Path, devices: int) -> None:
    run = disk.folder / "run"
    command = ["fit", "--config", recipe_file, "--run.folder", run, "--run.keep_last", 1, "--trainer.devices", devices]
    command += ["--network.learned_positions", "true", "--network.max_positions", 200_000]
    command += ["--trainer.val_check_interval", 1000, "--batches.workers", 2]
    disk.start(*command, "--trainer.max_steps", 100_000)
    disk.fill(20 * MEGABYTE)
    line = disk.line()
    [kept] = checkpoints(run)
    failed = f"step={step_of(kept) + 4:08d}.ckpt"
    assert line.startswith(f"error: {run / 'checkpoints' / failed}: ")
    assert "it needs 38.5 MB and " in line
    assert "make room, then run the same command again" in line
    assert not temporary_files(run)
    assert torch.load(kept, weights_only=True)["global_step"] == step_of(kept)
    disk.make_room()
    done = pipeline(*command, "--trainer.max_steps", step_of(kept) + 2)
    assert done.returncode == 0, done.stderr.decode()
    assert f"resuming from {kept}" in done.stderr.decode()
    assert [step_of(path) for path in checkpoints(run)] == [step_of(kept) + 2]


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_no_room_for_the_curves(disk: SmallDisk, recipe_file: Path, devices: int) -> None:
    run = disk.folder / "run"
    command = ["fit", "--config", recipe_file, "--run.folder", run, "--run.checkpoint_every_steps", 50]
    command += ["--trainer.val_check_interval", 10_000, "--run.log_every_steps", 1, "--trainer.devices", devices]
    disk.start(*command, "--trainer.max_steps", 100_000)
    disk.fill(0)
    assert disk.line().startswith(f"error: {run / 'tensorboard'}: ")
    newest = checkpoints(run)[-1]
    if disk.mounted:
        again = pipeline(*command, "--trainer.max_steps", 100_000)
        assert again.returncode == 2
        assert (
            again.stderr.decode().splitlines()[-1].startswith(f"error: {run / 'config.yaml'}: No space left on device;")
        )
    disk.make_room()
    done = pipeline(*command, "--trainer.max_steps", step_of(newest) + 2)
    assert done.returncode == 0, done.stderr.decode()
    assert f"resuming from {newest}" in done.stderr.decode()
