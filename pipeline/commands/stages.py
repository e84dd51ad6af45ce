"""Runs commands of this program as stages, one after another, each once, however often the sequence is stopped.

A stage is a process of its own, and leaves a mark when it has succeeded. One without a mark, or without a file that it
writes, is run: each command either continues from the files that it has written, or writes its files whole or not at
all.
"""

import ctypes
import glob
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO

from data_module.errors import PROGRAM, SCRIPTS, InputError
from data_module.system.files import FileLock, atomic_file, remove_temporary_files
from pipeline.runtime.console import report
from pipeline.runtime.signals import INTERRUPTED, STOPPED

_END_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of Linux: the signal that a process gets when its parent has ended."""
_STANDARD_ERROR = 2
_C_LIBRARY = ctypes.CDLL(None)


@dataclass(frozen=True)
class Stage:
    """A command, and the files by which the stages depend on one another."""

    name: str
    words: tuple[str, ...]
    """The command and its arguments."""
    reads: tuple[Path, ...]
    writes: tuple[Path, ...]
    printed: Path | None = None
    """The file that gets the standard output."""

    def line(self) -> str:
        """Return the command as it is typed."""
        output = f" > {shlex.quote(str(self.printed))}" if self.printed else ""
        return f"{SCRIPTS}{PROGRAM} {shlex.join(self.words)}{output}"


class StageFailed(Exception):
    """A stage has ended with an exit code other than 0."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        # The code that a shell reports if a signal has ended the process.
        self.code = code if code >= 0 else 128 - code


class Signals(AbstractContextManager["Signals"]):
    """Passes signals on to the running stage, which may have to save a checkpoint, and records them."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Signals":
        names = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
        self._before = {one: signal.getsignal(one) for one in names}
        for signum, handler in self._before.items():
            if handler is not signal.SIG_IGN:  # Under nohup it is ignored, and the stage inherits that.
                signal.signal(signum, self._hand_on)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _hand_on(self, signum: int, _frame: FrameType | None) -> None:
        self.received.append(signum)
        # A terminal sends Ctrl-C to both processes; a second one would end training without saving.
        if self.process is not None and signum != signal.SIGINT:
            self.process.send_signal(signum)

    def raise_if_stopped(self) -> None:
        """Raise StageFailed if a signal was received; called between two stages."""
        if self.received:
            raise StageFailed(INTERRUPTED if self.received[0] == signal.SIGINT else STOPPED)


def run_stages(folder: Path, stages: Sequence[Stage], only: str | None) -> int:
    """Run the stages that are not done, and return the exit code: 0, or that of the stage that failed.

    `folder` is that of the marks, `only` the name of the stage to run, None for all.

    Raises InputError if there is no stage named `only`, a file that a stage reads does not exist, or another process
    works in the folder.
    """
    if only is not None and only not in [stage.name for stage in stages]:
        raise InputError(f"--stage {only}: is none of {', '.join(stage.name for stage in stages)}")
    with FileLock(folder / ".lock") as lock, Signals() as signals:
        if not lock.take(shared=only is not None):  # Several tasks of a job array run the same stage.
            raise InputError(f"{folder}: another synthesize writes to it; wait for its end, or give another --folder")
        done = [stage for stage in stages if all(path.exists() for path in (_mark_file(folder, stage), *stage.writes))]
        left = [stage for stage in stages if stage not in done]
        for number, stage in enumerate(stages, 1):
            if stage not in left or only not in (None, stage.name):
                continue
            report(f"stage {number} of {len(stages)}, {stage.name} ({len(left)} left): {stage.line()}")
            try:
                signals.raise_if_stopped()
                _run(stage, signals)
            except StageFailed as failed:
                report(f"{stage.name} ended with exit code {failed.code}; run the same command again to go on")
                return failed.code
            with atomic_file(_mark_file(folder, stage)):
                pass  # It is empty.
            left.remove(stage)
    return 0


def _run(stage: Stage, signals: Signals) -> None:
    """Run a stage in a process of its own.

    Raises:
        InputError: a file that the stage reads does not exist.
        StageFailed: the exit code of the stage is not 0.
    """
    if missing := [path for path in stage.reads if not path.exists()]:
        raise InputError(f"{stage.name}: {missing[0]} does not exist; run the stages before it first")
    for path in stage.writes if stage.printed else ():  # Other commands tidy up themselves, and share their folders.
        if path.parent.is_dir():
            remove_temporary_files(path.parent, glob.escape(path.name))
    output: AbstractContextManager[IO[bytes] | None] = atomic_file(stage.printed) if stage.printed else nullcontext()
    with output as file:
        command = [*_program(), *stage.words]
        to = _STANDARD_ERROR if file is None else file
        with subprocess.Popen(command, stdout=to, preexec_fn=partial(_end_with, os.getpid())) as process:
            signals.process = process
            for signum in signals.received[:1]:
                process.send_signal(signum)  # It came before the process was started.
            code = process.wait()
            signals.process = None
        if code:
            raise StageFailed(code)


def _program() -> list[str]:
    """Return the command that started this program, which may be another one with extensions."""
    words = sys.orig_argv
    own = words[1 : words.index("synthesize")] if "synthesize" in words else ["-m", "pipeline"]
    return [sys.executable, *own]


def _end_with(parent: int) -> None:
    """Let the system kill this process if its parent ends, so that it does not run beside the stage of a new start."""
    if sys.platform == "linux":
        _C_LIBRARY.prctl(_END_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _mark_file(folder: Path, stage: Stage) -> Path:
    return folder / "done" / f"{stage.name}.json"  # Versions 1.0 and 1.1 kept hashes in it.
