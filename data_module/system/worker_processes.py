"""Worker processes of data loaders: how many may run, which signals they obey, and that they end with their parent."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from data_module.errors import InputError

_PARENT_CHECK_SECONDS = 2.0
"""How often a worker looks whether its parent process still runs."""


def num_processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0))  # Those that `taskset` or SLURM's binding excludes do not count.


def require_shared_memory() -> None:
    """Raise InputError if the locks of this process's loader cannot be created, which lie in shared memory."""
    try:
        multiprocessing.Lock()
    except OSError as error:
        raise InputError(
            f"/dev/shm: {error.strerror}; the processes of batches.workers share locks there: set batches.workers 0, or"
            " make it larger or writable (--shm-size of a container)"
        ) from None


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block the signals of SLURM and of a closing terminal, which would terminate processes that are started inside.

    A loader's workers then set up their own handling in `ignore_signals`.
    """
    stopping = {signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, stopping)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signals(_worker: int) -> None:
    """Ignore all signals but the SIGTERM by which a loader terminates its workers, and end with the loader's process.

    SLURM sends its signals to workers as well, and so does a terminal on Ctrl-C or when it is closed. If a signal ended
    a worker, the training process would fail before it has saved a checkpoint.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    # Not os.getppid(): if the parent has been killed meanwhile, that is the process that adopted this one.
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_exit_with, args=(parent.pid,), daemon=True).start()


def _exit_with(parent: int) -> None:
    """Exit on a SIGTERM of the parent process, or when that process has ended.

    PyTorch's own check is not enough: a worker whose batch no process reads waits forever to write it.
    """
    while os.getppid() == parent:
        received = signal.sigtimedwait({signal.SIGTERM}, _PARENT_CHECK_SECONDS)
        if received is not None and received.si_pid == parent:
            break
    os._exit(0)
