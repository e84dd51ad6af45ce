"""Worker processes of the training loader: how they are started, and how batches get from them to this process."""

import errno
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import clear_frames

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import get_worker_info

from data_module.errors import InputError
from data_module.system.files import write_error
from data_module.system.worker_processes import signals_blocked

_SHARED_MEMORY = Path("/dev/shm")


class SentAsBytes:
    """A dataclass whose tensors are pickled as bytes.

    PyTorch would share file descriptors, for which the receiving process must connect back to the sender.
    """

    def __getstate__(self) -> dict[str, object]:
        return {name: value.numpy() if isinstance(value, Tensor) else value for name, value in vars(self).items()}

    def __setstate__(self, state: dict[str, object]) -> None:
        for name, value in state.items():
            setattr(self, name, torch.from_numpy(value) if isinstance(value, np.ndarray) else value)

    def share_from_worker(self) -> None:
        """Move the tensors to shared memory if this is a worker process."""
        # PyTorch's sending thread would share the tensors too. But if shared memory is full, it loses the batch, and
        # the loader waits for that batch forever.
        if get_worker_info() is not None:
            for tensor in (value for value in vars(self).values() if isinstance(value, Tensor)):
                tensor.share_memory_()


@contextmanager
def starting_workers() -> Iterator[None]:
    """Inside, a loader may fork its workers.

    Before, the process group's threads get time to release the tensors of the last collective. For that, a thread takes
    a lock of the interpreter. Python 3.11 does not reset this lock in a forked child (3.12 does), so a worker that is
    forked while the lock is held waits for it forever.
    """
    if sys.version_info < (3, 12) and dist.is_initialized():
        time.sleep(0.1)  # On an idle machine the threads need a few microseconds.
    with naming_shared_memory(), signals_blocked():
        yield


@contextmanager
def naming_shared_memory() -> Iterator[None]:
    """Convert errors of shared memory that cannot be written, which name no path, to an `InputError`."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        # Locks of the workers' queues raise an OSError without a file name; tensors raise a RuntimeError.
        if getattr(error, "filename", None) or not (isinstance(error, OSError) or "shared memory" in str(error)):
            raise
        # PyTorch's half-constructed iterator would print another error when it is deleted.
        hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
        clear_frames(error.__traceback__)
        sys.unraisablehook = hook
        reasons = (os.strerror(number) for number in (errno.ENOSPC, errno.EROFS, errno.EACCES))
        reason = next((reason for reason in reasons if reason in str(error)), str(error).splitlines()[-1])
        raise _shared_memory_error(reason) from None


def require_shared_memory() -> None:
    """Raise InputError if this process's workers could not pass batches to it through shared memory."""
    if _SHARED_MEMORY.is_dir() and (error := write_error(_SHARED_MEMORY)):
        raise _shared_memory_error(error)


def _shared_memory_error(reason: str) -> InputError:
    return InputError(
        f"{_SHARED_MEMORY}: {reason}; the processes of batches.workers pass batches in this shared memory: set "
        "batches.workers 0, or make it larger or writable (--shm-size of a container)"
    )
