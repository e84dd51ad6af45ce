"""Signals that ask the program to stop: the handler records them and does nothing else.

SLURM sends SIGUSR1 (`--signal`) or SIGTERM before it takes the nodes away, and a closing terminal sends SIGHUP. Ranks
receive the signal at different moments of their work. The handler is installed before any slow import.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOPPED = 75
"""Exit code of a run that was stopped before its last step and can be resumed: EX_TEMPFAIL, "try again later"."""
INTERRUPTED = 130
"""Exit code of such a run after Ctrl-C."""

_received: list[int] = []
"""Signals received, in order."""
_STOP_SIGNALS = [signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP]


class Stopped(Exception):
    """The run has stopped at a point from which it can be resumed."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.exit_code = INTERRUPTED if first_signal() == signal.SIGINT else STOPPED


def record(signum: int, _frame: FrameType | None) -> None:
    """Record a signal; this is the handler."""
    _received.append(signum)
    if signum == signal.SIGINT:
        signal.signal(signal.SIGINT, _stop_at_once)


def _stop_at_once(_signum: int, _frame: FrameType | None) -> None:
    """Handle the second Ctrl-C. On a KeyboardInterrupt, Lightning would exit with code 1 and without a message."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # A third one ends the program without cleanup.
    raise Stopped("interrupted twice: ended without saving; run the same command to resume from the last checkpoint")


def install() -> None:
    """Record stop signals from now on. An ignored SIGHUP stays ignored: `nohup` keeps the run alive that way."""
    for signum in _STOP_SIGNALS:
        if (signum, signal.getsignal(signum)) != (signal.SIGHUP, signal.SIG_IGN):
            signal.signal(signum, record)


def ignore() -> None:
    """Ignore stop signals and Ctrl-C from now on.

    On exit Python would restore the default handlers, and a signal would then change the exit code. A Ctrl-C would
    print a traceback, and interrupt the code that ends the other ranks.
    """
    for signum in (*_STOP_SIGNALS, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)


def first_signal() -> int | None:
    """Return the first stop signal received, None if there was none."""
    return _received[0] if _received else None


def forget() -> None:
    """Forget the signals received, in a process that may train again."""
    _received.clear()


def raise_if_stopped(where: str) -> None:
    """Raise Stopped if a stop signal was received; for moments with nothing to save."""
    if _received:
        raise Stopped(f"asked to stop {where}; nothing was lost, run the same command to resume")


@contextmanager
def default_signals() -> Iterator[None]:
    """Inside, let stop signals end the program at once, earlier ones included: for long work that loses nothing."""
    raise_if_stopped("at the start")
    with not_recorded():
        yield


@contextmanager
def not_recorded() -> Iterator[None]:
    """Inside, let stop signals end the program at once, instead of being recorded."""
    recorded = [signum for signum in _STOP_SIGNALS if signal.getsignal(signum) is record]
    for signum in recorded:
        signal.signal(signum, signal.SIG_DFL)
    try:
        yield
    finally:
        for signum in recorded:
            signal.signal(signum, record)


@contextmanager
def keyboard_interrupt_recorded() -> Iterator[None]:
    """Inside, record Ctrl-C as a stop signal; outside, it ends the program."""
    if threading.current_thread() is not threading.main_thread():
        # Python calls handlers in the main thread, and only the main thread may set them.
        yield
        return
    before = signal.signal(signal.SIGINT, record)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
