"""Signals that ask the program to stop: a handler sets a flag and nothing else.

SLURM sends SIGUSR1 (`--signal`) or SIGTERM before it takes the nodes away, to each rank at another moment of its
work. Installed before anything that takes time is imported.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOPPED = 75
"""Exit code of a run that has stopped before its last step and can go on: EX_TEMPFAIL, "try again later"."""
INTERRUPTED = 130
"""The same, by Ctrl-C."""

_ASKED: list[int] = []
"""Signals received, in order."""
_ASKING = [signal.SIGUSR1, signal.SIGTERM]


class Stopped(Exception):
    """The run has stopped where it can go on."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.exit_code = INTERRUPTED if first_signal() == signal.SIGINT else STOPPED


def note(signum: int, _frame: FrameType | None) -> None:
    """The handler."""
    _ASKED.append(signum)
    if signum == signal.SIGINT:
        # Whoever presses Ctrl-C again does not want to wait.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def install() -> None:
    """Note the signals from now on."""
    for signum in _ASKING:
        signal.signal(signum, note)


def ignore() -> None:
    """Nothing is left to stop: on its way out Python would put back what ends the program with another exit code."""
    for signum in _ASKING:
        signal.signal(signum, signal.SIG_IGN)


def first_signal() -> int | None:
    """The first signal that has come, or None."""
    return _ASKED[0] if _ASKED else None


def raise_if_stopped(where: str) -> None:
    """Raises Stopped where nothing is there to be saved yet."""
    if _ASKED:
        raise Stopped(f"asked to stop {where}; nothing was lost, the same command goes on")


@contextmanager
def default_signals() -> Iterator[None]:
    """Inside, the signals end the program as they would any other: for long work that loses nothing."""
    raise_if_stopped("at the start")
    for signum in _ASKING:
        signal.signal(signum, signal.SIG_DFL)
    try:
        yield
    finally:
        install()


@contextmanager
def keyboard_interrupt_noted() -> Iterator[None]:
    """Inside, Ctrl-C asks to stop as well; outside it ends the program."""
    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
