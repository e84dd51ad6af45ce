"""Ctrl-C, SIGTERM and trainer.max_time outside SLURM: the run saves after the step, ends, and resumes from there."""

import itertools
import os
import re
import signal
import subprocess
import termios
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.training import graceful_stop
from tests.conftest import ROOT, program, run_here
from tests.fork_server import ForkServer
from tests.integration.runs import assert_ended, checkpoints, descendants, start, step_of

RARELY = ["--run.checkpoint_every_steps", 100_000, "--trainer.val_check_interval", 100_000]


def test_stopped_and_resumed(recipe_file: Path, tmp_path: Path) -> None:
    """By Ctrl-C; test_graceful_stop.py has two ranks, test_kills.py compares with an uninterrupted run."""
    run, log = tmp_path / "run", tmp_path / "stderr"
    command = ["fit", "--config", recipe_file, "--run.folder", run, "--batches.workers", 2, *RARELY]
    with log.open("w") as stderr:
        process = start(*command, "--trainer.max_steps", 100_000, stderr=stderr)
    while "training: step" not in log.read_text() and process.poll() is None:  # It has logged a step.
        time.sleep(0.01)
    children = descendants(process)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130, log.read_text()
    [saved] = checkpoints(run)
    assert log.read_text().count(f"asked to stop: saved after step {step_of(saved)}; ") == 1
    assert "Traceback" not in log.read_text()
    assert_ended(children)
    _, said = run_here(*command, "--trainer.max_steps", step_of(saved) + 5)
    assert said.count(f"resuming from {saved}") == 1
    assert [step_of(path) for path in checkpoints(run)] == [step_of(saved) + 5]


def test_a_closed_terminal(recipe_file: Path, tmp_path: Path) -> None:
    """Every write to it fails from then on; the run saves and stops as by SIGTERM."""
    terminal, stderr = os.openpty()
    termios.tcsetwinsize(stderr, (24, 80))
    run = tmp_path / "run"
    command = ["fit", "--config", recipe_file, "--run.folder", run, "--trainer.max_steps", 100_000, *RARELY]
    process = start(*command, stderr=stderr)
    os.close(stderr)
    shown = b""
    with suppress(OSError), os.fdopen(terminal, "rb", buffering=0) as screen:
        while not re.search(rb" [1-9]\d*/100000 \[", shown):  # The bar ends no line.
            shown += screen.read(1000)
    process.send_signal(signal.SIGHUP)
    assert process.wait() == 75
    assert len(checkpoints(run)) == 1


def test_signals_after_the_end(recipe_file: Path, tmp_path: Path) -> None:
    """They are ignored while the process of a finished run exits."""
    log = tmp_path / "stderr"
    with log.open("w") as stderr:
        process = start(
            "fit", "--config", recipe_file, "--run.folder", tmp_path / "run", "--trainer.max_steps", 3, stderr=stderr
        )
    while "the run is in" not in log.read_text() and process.poll() is None:
        time.sleep(0.005)
    time.sleep(0.1)
    while process.poll() is None:
        with suppress(ProcessLookupError):  # It has ended in between.
            process.send_signal(signal.SIGUSR1)
        time.sleep(0.005)
    assert process.returncode == 0, log.read_text()


def test_max_time(recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each start trains for max_time, exits with 75 and saves a checkpoint, which the next one replaces."""
    run, quarters = tmp_path / "run", itertools.count()
    clock = SimpleNamespace(monotonic=lambda: next(quarters) / 4)  # A look at it takes a quarter of a second.
    monkeypatch.setattr(graceful_stop, "time", clock)
    command = ["fit", "--config", recipe_file, "--run.folder", run, "--trainer.max_time", "00:00:00:01", *RARELY]
    steps = []
    for _ in range(2):
        _, said = run_here(*command, code=75)
        steps.append(step_of(checkpoints(run)[-1]))
        assert (
            said.splitlines()[-1]
            == f"trainer.max_time has passed: saved after step {steps[-1]}; run the same command to resume"
        )
    assert steps == [4, 8]
    assert [step_of(path) for path in checkpoints(run)] == [8]


def test_nothing_is_left_of_an_interrupted_test() -> None:
    """A fork that a test waits for ends with the test's process, and so do the processes that it has started."""
    code = (
        "import os, subprocess; sleep = subprocess.Popen(['sleep', '600']); print(os.getpid(), sleep.pid); sleep.wait()"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    command = [ForkServer.shared().python, "-m", "tests.run_code", code]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as waiting:
        assert waiting.stdout is not None
        pids = set(map(int, waiting.stdout.readline().split()))
        waiting.kill()
    assert len(pids) == 2
    assert_ended(pids)


@pytest.mark.slow
def test_signals_do_not_end_compiler_processes(tmp_path: Path) -> None:
    """SLURM sends signals to all processes of a step; a run that compiles waits for these processes."""
    code = """
import os, signal
from contextlib import suppress
from pathlib import Path
from pipeline.runtime.signals import install
from pipeline.runtime.compiled_code import start_compiler
import torch._inductor.config
from torch._inductor.async_compile import AsyncCompile

install()
torch._inductor.config.compile_threads = 2
start_compiler()
AsyncCompile.process_pool().submit(os.getpid).result()
helpers = [os.getpid()]
for parent in helpers:
    for thread in Path(f"/proc/{parent}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            helpers += map(int, (thread / "children").read_text().split())
assert len(helpers) > 2
for signum in (signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM):
    for helper in helpers[1:]:
        os.kill(helper, signum)
    AsyncCompile.process_pool().submit(os.getpid).result()
"""
    done = program(code, XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr.decode()
