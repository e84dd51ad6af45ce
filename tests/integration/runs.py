"""Training processes to kill, and what their runs have left."""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conftest import ROOT
from tests.fork_server import ForkedProcess, ForkServer


def start(*arguments: object, module: str = "pipeline", stderr: Any = None, **environment: str) -> ForkedProcess:
    """`python -m pipeline ...`, or another module, going on by itself; silent unless told where to speak."""
    return ForkServer.shared().start(
        module,
        list(map(str, arguments)),
        environment={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment},
        stderr=stderr or subprocess.DEVNULL,
    )


def kill(process: ForkedProcess) -> bool:
    """SIGKILL; whether it hit a process that was still running."""
    process.send_signal(signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


def accumulator(run: Path) -> EventAccumulator:
    """All that TensorBoard's own reader finds in a run."""
    events = EventAccumulator(
        str(run / "tensorboard"), size_guidance=dict.fromkeys(("scalars", "tensors", "images"), 0)
    )
    events.Reload()
    return events


def scalars(run: Path, tag: str) -> list[tuple[int, float]]:
    """A curve as TensorBoard shows it: (step, value)."""
    return [(event.step, event.value) for event in accumulator(run).Scalars(tag)]


def checkpoints(run: Path) -> list[Path]:
    """Whatever has a checkpoint's final name, the newest last."""
    return sorted((run / "checkpoints").glob("step=*.ckpt"))


def temporary_files(run: Path) -> list[Path]:
    return list((run / "checkpoints").glob(".*.tmp"))


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.stem.removeprefix("step="))


def assert_same_state(left: Path, right: Path) -> None:
    """Two checkpoints hold the same weights, Adam moments and position in the data, bit for bit."""
    ours, theirs = (torch.load(path, weights_only=True, mmap=True) for path in (left, right))
    assert ours["global_step"] == theirs["global_step"]
    assert ours["state_dict"].keys() == theirs["state_dict"].keys()
    for name, weight in ours["state_dict"].items():
        assert torch.equal(weight, theirs["state_dict"][name]), name
    [adam], [other] = ours["optimizer_states"], theirs["optimizer_states"]
    assert adam["state"].keys() == other["state"].keys()
    for key, moments in adam["state"].items():
        for name, moment in moments.items():
            assert torch.equal(moment, other["state"][key][name]), (key, name)
    assert position(ours) == position(theirs)


def position(contents: dict) -> dict:
    """Where in the data a checkpoint stands."""
    [state] = contents["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    return state


def descendants(process: ForkedProcess) -> set[int]:
    """The ranks, loader workers and helpers that a process has started, and those that they have."""
    parents = {pid: parent for pid, (parent, _) in _processes().items()}
    found = {process.pid}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {process.pid}


def still_there(pids: set[int]) -> set[int]:
    """Those that run; a dead one that nobody has asked after does not."""
    return {pid for pid, (_, state) in _processes().items() if pid in pids and state != "Z"}


def _processes() -> dict[int, tuple[int, str]]:
    """Parent and state of every process."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid=,state="], capture_output=True, text=True, check=True).stdout
    rows = (line.split() for line in listed.splitlines())
    return {int(pid): (int(parent), state) for pid, parent, state in rows}
