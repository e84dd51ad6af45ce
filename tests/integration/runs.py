"""Start and kill training processes, and read what they wrote to their run folders."""

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import IO

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conftest import ROOT
from tests.fork_server import ForkedProcess, ForkServer


def start(
    *arguments: object, module: str = "pipeline", stderr: int | IO[bytes] | None = None, **environment: str
) -> ForkedProcess:
    """Start `python -m pipeline ...`, or another module, without waiting; by default its stderr is discarded."""
    return ForkServer.shared().start(
        module,
        list(map(str, arguments)),
        environment={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment},
        stderr=stderr or subprocess.DEVNULL,
    )


TRAINING = "model.training_module.TranslationModule.training_step"


def held(calls: int, function: str = TRAINING, until: str | Path = "/none") -> dict[str, str]:
    """Return the environment in which changed_program.py waits after so many calls, for a file or to be killed."""
    return {"CHANGE": "hold", "HOLD": f"{function} {calls} {until}"}


def kill(process: ForkedProcess) -> bool:
    """Send SIGKILL; return whether the process was still running."""
    process.send_signal(signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


def accumulator(run: Path) -> EventAccumulator:
    """Return TensorBoard's reader of a run, with all events loaded."""
    events = EventAccumulator(
        str(run / "tensorboard"), size_guidance=dict.fromkeys(("scalars", "tensors", "images"), 0)
    )
    events.Reload()
    return events


def scalars(run: Path, tag: str) -> list[tuple[int, float]]:
    """Return a curve as TensorBoard shows it: pairs of step and value."""
    return [(event.step, event.value) for event in accumulator(run).Scalars(tag)]


def checkpoints(run: Path) -> list[Path]:
    """Return the files with the final name of a checkpoint, the newest last."""
    return sorted((run / "checkpoints").glob("step=*.ckpt"))


def temporary_files(run: Path) -> list[Path]:
    return list((run / "checkpoints").glob(".*.tmp"))


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.stem.removeprefix("step="))


def assert_same_state(left: Path, right: Path) -> None:
    """Check that two checkpoints hold the same weights, averages, moments and position in the data, bit for bit."""
    left_state, right_state = (torch.load(path, weights_only=True, mmap=True) for path in (left, right))
    assert left_state["global_step"] == right_state["global_step"]
    assert left_state.keys() == right_state.keys()
    for part in {"state_dict", "current_model_state"} & left_state.keys():  # with an average, weights are in the latter
        assert left_state[part].keys() == right_state[part].keys()
        for name, weight in left_state[part].items():
            assert torch.equal(weight, right_state[part][name]), name
    [left_adam], [right_adam] = left_state["optimizer_states"], right_state["optimizer_states"]
    assert left_adam["state"].keys() == right_adam["state"].keys()
    for key, moments in left_adam["state"].items():
        for name, moment in moments.items():
            assert torch.equal(moment, right_adam["state"][key][name]), (key, name)
    assert position(left_state) == position(right_state)


def is_same_corpus(left: Path, right: Path) -> bool:
    """Check that two folders hold the same files, with no temporary files beside them."""
    names = {path.name for path in left.iterdir()}
    assert names == {path.name for path in right.iterdir()}
    assert not list(left.parent.glob(".corpus.*"))
    return all((left / name).read_bytes() == (right / name).read_bytes() for name in names)


def position(contents: dict) -> dict:
    [state] = contents["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    return state


def descendants(process: ForkedProcess) -> set[int]:
    """Return the ids of the processes that a process has started, directly or indirectly."""
    parents = {pid: parent for pid, (parent, _) in _processes().items()}
    found = {process.pid}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {process.pid}


def assert_ended(pids: set[int]) -> None:
    """Wait until no process of these runs, for two minutes at most; a zombie does not run."""
    deadline = time.monotonic() + 120
    while running := {pid for pid, (_, state) in _processes().items() if pid in pids and state != "Z"}:
        assert time.monotonic() < deadline, running
        time.sleep(0.1)


def _processes() -> dict[int, tuple[int, str]]:
    listed = subprocess.run(["ps", "-eo", "pid=,ppid=,state="], capture_output=True, text=True, check=True).stdout
    rows = (line.split() for line in listed.splitlines())
    return {int(pid): (int(parent), state) for pid, parent, state in rows}
