"""Worker processes of the training loader: how they are started, and how batches get from them to this process."""

import multiprocessing
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from data_module.errors import InputError
from data_module.system.worker_processes import signals_blocked


class SentAsBytes:
    """A dataclass whose tensors are pickled as bytes.

    PyTorch would share file descriptors, for which the receiving process must connect back to the sender.
    """

    def __getstate__(self) -> dict[str, object]:
        return {name: value.numpy() if isinstance(value, Tensor) else value for name, value in vars(self).items()}

    def __setstate__(self, state: dict[str, object]) -> None:
        for name, value in state.items():
            setattr(self, name, torch.from_numpy(value) if isinstance(value, np.ndarray) else value)


@contextmanager
def starting_workers() -> Iterator[None]:
    """Inside, a loader may fork its workers.

    Before, the process group's threads get time to release the tensors of the last collective. For that, a thread takes
    a lock of the interpreter. Python 3.11 does not reset this lock in a forked child (3.12 does), so a worker that is
    forked while the lock is held waits for it forever.
    """
    if sys.version_info < (3, 12) and dist.is_initialized():
        time.sleep(0.1)  # On an idle machine the threads need a few microseconds.
    with signals_blocked():
        yield


def require_shared_memory() -> None:
    """Raise InputError if the locks of this process's loader cannot be created, which lie in shared memory."""
    try:
        multiprocessing.Lock()
    except OSError as error:
        raise InputError(
            f"/dev/shm: {error.strerror}; the processes of batches.workers share locks there: set batches.workers 0, or"
            " make it larger or writable (--shm-size of a container)"
        ) from None
