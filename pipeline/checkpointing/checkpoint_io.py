"""Writes checkpoints in the background, from a copy in host memory."""

import mmap
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import TorchCheckpointIO

from pipeline.checkpointing.checkpoint import write_atomic
from pipeline.runtime.console import say, user_message
from pipeline.runtime.memory import can_measure_peak, host_memory_limit, private_memory


class HostCopy:
    """One block of host memory, reserved once, that holds the bytes of a checkpoint's file until they are written.

    The block is no part of the allocator's memory, and processes that are forked do not get it: a loader worker would
    otherwise keep the pages that it was forked with, which doubles the memory.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._processes = 1
        self._end = 0
        self.refusal = "no memory was reserved"
        """Why there is no block."""

    @property
    def size(self) -> int:
        """Bytes of the block; 0 if there is none."""
        return len(self._memory) if self._memory is not None else 0

    def reserve(self, size: int, processes: int) -> bool:
        """Replace the block by one of `size` bytes, whose pages are in memory; return whether there was room for it.

        Args:
            size: bytes.
            processes: how many processes share the node's memory; see `host_memory_limit`.
        """
        self.release()
        self._processes = processes
        if not can_measure_peak():
            self.refusal = "this system does not say how much memory a process takes"
            return False
        limit = host_memory_limit(processes)
        self.refusal = f"a copy of {size / 1e6:,.0f} MB does not fit, {limit.owner} has {limit.size / 1e6:,.0f} MB"
        if private_memory() + size > limit.size:
            return False
        try:
            # All pages are in memory from now on: what is measured to fit beside the block still fits when a checkpoint
            # is written to it.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
            self._memory = mmap.mmap(-1, size, flags=flags)
        except OSError:
            return False
        self._memory.madvise(mmap.MADV_DONTFORK)
        return True

    def release(self) -> None:
        """Give the block back. No copy may be in use."""
        self._memory = None

    def take(self, contents: dict[str, Any]) -> memoryview | None:
        """Return the file of a checkpoint's contents, which is valid until the next call.

        A file that is larger than the block, because of an optimizer with more state than Adam, gets a larger block.
        None if there is no room for it.
        """
        if self._memory is None:
            return None
        self._end = 0
        torch.save(contents, self)  # type: ignore[arg-type]  # It calls write and flush only.
        if self._end > self.size:
            if not self.reserve(self._end, self._processes):
                return None
            return self.take(contents)
        return memoryview(self._memory)[: self._end]

    def write(self, data: memoryview) -> int:
        """Take a part of the file from `torch.save`. Parts that do not fit are counted only."""
        start, self._end = self._end, self._end + len(data)
        if self._memory is not None and self._end <= self.size:
            self._memory[start : self._end] = data
        return len(data)

    def flush(self) -> None:
        """Do nothing; `torch.save` calls it."""


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
        self._write: Future[None] | None = None
        """The write in flight, or one whose error has not been raised."""

    def reserve(self, size: int, processes: int) -> None:
        """Write in the background from now on if the host has room for a copy of `size` bytes; see `HostCopy`."""
        self._copy.reserve(size, processes)

    def release(self) -> None:
        """Give the copy's memory back, if there is one, and write in the foreground from now on."""
        self.wait()
        if self.copy_bytes:
            self._copy.refusal = f"the micro-batches and a copy of {self.copy_bytes / 1e6:,.0f} MB do not fit together"
        self._copy.release()

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

        Raises OSError when the disk is too full for it; one that is written in the background raises it at the next
        call of this function, `raise_error` or `wait`.
        """
        options = storage_options or WriteOptions()
        # The checkpoint comes last. It records that this step is the best one: were it written first, a run that is
        # killed between the two would resume from it and never write the best one.
        files = [*options.copies, Path(path)]
        # There is one block for all copies, so the one before must be on disk. Its error ends the run here: to go on
        # would leave a user with a full disk and ever older checkpoints.
        self.wait()
        had_copy = bool(self.copy_bytes)
        copied = self._copy.take(checkpoint)

        def write() -> None:
            for file in files:
                write_atomic(checkpoint if copied is None else copied, file)
            # `afterwards` removes old checkpoints. It comes last, so that a kill at any moment leaves them or those
            # that replace them.
            options.afterwards()

        if copied is None:
            if had_copy:
                say(f"checkpoints: {self.describe()}")
            write()
            return
        # The interpreter waits for an executor's thread before it exits, also after an error, so the file is written
        # whole.
        executor = ThreadPoolExecutor(1, "checkpoint-writer")
        self._write = executor.submit(write)
        executor.shutdown(wait=False)

    def raise_error(self) -> None:
        """Raise the error of a write that has failed, once; do not wait for one in flight."""
        if self._write is not None and self._write.done():
            ended, self._write = self._write, None
            ended.result()

    def join(self) -> None:
        """Wait for the write in flight, also if it fails. Any thread may call this."""
        if (write := self._write) is not None:
            wait([write])

    def wait(self) -> None:
        """Wait for the write in flight; raise its error."""
        self.join()
        self.raise_error()

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
    writer = trainer.strategy.checkpoint_io
    assert isinstance(writer, AtomicCheckpointIO)
    return writer
