"""Writes checkpoints in the background, from a copy in host memory."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.plugins import TorchCheckpointIO

from pipeline.checkpointing.checkpoint import write_atomic
from pipeline.checkpointing.host_copy import HostCopy
from pipeline.runtime.console import say
from pipeline.runtime.errors import user_message


class BackgroundTask:
    """A thread that runs one function at a time, and the error of the last one."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, function: Callable[[], None]) -> None:
        """Run a function in the background. The previous one must have been waited for."""
        assert self._thread is None
        # A daemon's thread would be cut off where the process ends without waiting.
        self._thread = threading.Thread(target=self._run, args=[function], name="checkpoint-writer", daemon=False)
        self._thread.start()

    def _run(self, function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            self._error = error

    def join(self) -> None:
        """Wait for the function to end, also with an error."""
        if (thread := self._thread) is not None:  # Another thread that waits may remove it.
            thread.join()
            self._thread = None

    def raise_error(self) -> None:
        """Raise the error of a function that has failed, once; do not wait for one that still runs."""
        if (error := self._error) is not None:
            self._error = None
            raise error

    def wait(self) -> None:
        """Wait for the function to end; raise its error."""
        self.join()
        self.raise_error()


@dataclass(frozen=True)
class WriteOptions:
    """What else to do with a checkpoint, as Lightning's `storage_options`."""

    copies: tuple[Path, ...] = ()
    """Other files with the same contents, written before the checkpoint itself."""
    afterwards: Callable[[], None] = lambda: None
    """Called when all files have their final names."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write Lightning's checkpoints under a temporary name, then rename them.

    After `reserve`, training waits only until the contents are copied to host memory; a thread then writes them. At
    most one write is in flight: the next one waits for it. Lightning calls this object on rank 0 only.
    """

    def __init__(self) -> None:
        super().__init__()
        self._copy = HostCopy()
        self._task = BackgroundTask()

    def reserve(self, size: int, processes: int, pinned: bool) -> None:
        """Write in the background from now on if the host has room for a copy of `size` bytes; see `HostCopy`."""
        self._copy.reserve(size, processes, pinned)

    def release(self) -> bool:
        """Give the copy's memory back and write in the foreground; return whether there was a copy."""
        self._task.wait()
        self._copy.refusal = f"the micro-batches and a copy of {self._copy.size / 1e6:,.0f} MB do not fit together"
        return self._copy.release()

    @property
    def copy_bytes(self) -> int:
        """Host memory that is reserved for the copy; 0 if checkpoints are written in the foreground."""
        return self._copy.size

    def describe(self) -> str:
        """Say how checkpoints are written, for the line that `fit` prints at its start."""
        if self.copy_bytes:
            return f"written in the background from a copy in memory of {self.copy_bytes / 1e6:,.0f} MB"
        return f"training waits while they are written: {self._copy.refusal}"

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Save the whole checkpoint, or leave nothing behind.

        Raises InputError when the disk is too full for it; one that is written in the background raises it at the next
        call of this function, `raise_error` or `wait`.
        """
        options = storage_options or WriteOptions()
        files = [*options.copies, Path(path)]
        self.wait()
        in_background = bool(self.copy_bytes)
        contents = self._copy.take(checkpoint)

        def write() -> None:
            for file in files:
                write_atomic(checkpoint if contents is None else contents, file)
            options.afterwards()

        if contents is not None:
            self._task.start(write)
            return
        if in_background:
            say(f"checkpoints: {self.describe()}")
        write()

    def raise_error(self) -> None:
        """Raise the error of a write that has failed."""
        self._task.raise_error()

    def join(self) -> None:
        """Wait for the write in flight, also if it fails."""
        self._task.join()

    def wait(self) -> None:
        """Wait for the write in flight; raise its error."""
        self._task.wait()

    def teardown(self) -> None:
        """Wait for the write in flight, and report its error.

        After a training that has ended in order there is none. Where an error has ended it, that one is the cause.
        """
        try:
            self.wait()
        except Exception as error:
            message = user_message(error) or f"{type(error).__name__}: {error}"
            say(f"warning: the last checkpoint was not written: {message}")
        self._copy.release()
        super().teardown()


def checkpoint_io(trainer: Trainer) -> AtomicCheckpointIO:
    """Return the object that writes a trainer's checkpoints."""
    one = trainer.strategy.checkpoint_io
    assert isinstance(one, AtomicCheckpointIO)
    return one
