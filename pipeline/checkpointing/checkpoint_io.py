"""Writes checkpoints in the background, from a copy in host memory."""

import mmap
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from copy import deepcopy
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import TorchCheckpointIO
from torch import Tensor

from data_module.files import PlainValues
from pipeline.checkpointing.checkpoint import write_atomic
from pipeline.runtime.console import say, user_message
from pipeline.runtime.memory import can_measure_peak, host_memory_limit, private_memory, release_freed_memory


class HostCopy:
    """Host memory, reserved once, to which a checkpoint's tensors are copied until they are written."""

    def __init__(self) -> None:
        self._memory = np.empty(0, dtype=np.uint8)
        self._processes = 1
        self.refusal = "no memory was reserved"
        """Why there is no room for a copy."""

    @property
    def size(self) -> int:
        """Bytes reserved; 0 if there was no room."""
        return self._memory.nbytes

    def reserve(self, size: int, processes: int) -> None:
        """Release the reserved memory, and reserve `size` bytes if there is room; `processes` share the node's."""
        self.release()
        self._processes = processes
        if not can_measure_peak():
            self.refusal = "this system does not report how much memory a process uses"
            return
        limit = host_memory_limit(processes)
        self.refusal = f"a copy of {size / 1e6:,.0f} MB does not fit, {limit.owner} has {limit.size / 1e6:,.0f} MB"
        if private_memory() + size <= limit.size:
            memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            # Forked loader processes would otherwise keep the pages of earlier copies.
            memory.madvise(mmap.MADV_DONTFORK)
            self._memory = np.frombuffer(memory, dtype=np.uint8)
            # Touch all pages now, so that the later measurement of micro-batches counts this memory as used.
            self._memory.fill(0)

    def release(self) -> None:
        """Give the memory back. No copy may be in use."""
        self._memory = np.empty(0, dtype=np.uint8)
        release_freed_memory()

    def take(self, contents: PlainValues) -> PlainValues | None:
        """Return a copy of a checkpoint's contents, which is valid until the next call; None if there is no room.

        An optimizer with more state than Adam needs more memory than was reserved, which is reserved here.
        """
        if not self.size:
            return None
        tensors = list(_tensors(contents))
        # Tensors that share memory, such as tied weights, share it in the copy and in the file.
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in tensors}
        ends = dict(zip(storages, accumulate(_aligned(one.nbytes()) for one in storages.values()), strict=True))
        needed = max(ends.values(), default=0)
        if needed > self.size:
            self.reserve(needed, self._processes)
            if not self.size:
                return None
        copies = {}
        for key, storage in storages.items():
            start = ends[key] - _aligned(storage.nbytes())
            copies[key] = torch.from_numpy(self._memory[start : start + storage.nbytes()]).untyped_storage()
            copies[key].copy_(storage)
        placed: dict[int, object] = {}
        for one in tensors:
            copy = copies[one.untyped_storage().data_ptr()]
            placed[id(one)] = torch.empty(0, dtype=one.dtype).set_(copy, one.storage_offset(), one.shape, one.stride())
        return deepcopy(contents, placed)


def _tensors(value: object) -> Iterator[Tensor]:
    """Yield the plain tensors in nested values."""
    if type(value) is Tensor and value.layout == torch.strided and value.numel():
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _aligned(size: int) -> int:
    """Return the bytes to reserve for a tensor of this size, so that each tensor begins at a multiple of 64."""
    return -(-size // 64) * 64


@dataclass(frozen=True)
class WriteOptions:
    """What to do besides writing a checkpoint; passed as Lightning's `storage_options`."""

    copies: tuple[Path, ...] = ()
    """Other files with the same contents, written before the checkpoint itself."""
    afterwards: Callable[[], None] = lambda: None
    """Called when all files have their final names."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write Lightning's checkpoints under a temporary name, then rename them.

    After `copy.reserve`, training waits only until the contents are copied to host memory; a thread then writes them.
    At most one write is in flight: the next one waits for it. Lightning calls this object on rank 0 only.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copy = HostCopy()
        self._write: Future[None] | None = None
        """The write in flight, or a failed one whose error has not been raised yet."""

    def release(self) -> None:
        """Give the copy's memory back, if there is one, and write in the foreground from now on."""
        self.wait()
        if self.copy.size:
            self.copy.refusal = f"the micro-batches and a copy of {self.copy.size / 1e6:,.0f} MB do not fit together"
        self.copy.release()

    def describe(self) -> str:
        """Say how checkpoints are written, for the line that `fit` prints at its start."""
        if self.copy.size:
            return f"written in the background from a copy in memory of {self.copy.size / 1e6:,.0f} MB"
        return f"training waits while they are written: {self.copy.refusal}"

    def save_checkpoint(
        self, checkpoint: PlainValues, path: str | Path, storage_options: WriteOptions | None = None
    ) -> None:
        """Save the whole checkpoint, or leave nothing behind.

        Raises OSError when the disk is too full. The error of a write in the background is raised by the next call of
        this function, `raise_error` or `wait`.
        """
        options = storage_options or WriteOptions()
        # The checkpoint comes last, because it records that this step is the best one: if it came first, a run that is
        # killed between the two writes would resume from it and never write the best one.
        files = [*options.copies, Path(path)]
        # All copies use the same memory, so the previous one must be on disk. Its error ends the run here: a run that
        # went on with a full disk would have ever older checkpoints.
        self.wait()
        had_copy = bool(self.copy.size)
        copied = self.copy.take(checkpoint)

        def write() -> None:
            for file in files:
                write_atomic(checkpoint if copied is None else copied, file)
            # `afterwards` removes old checkpoints. It comes last, so that a process killed at any moment leaves them or
            # the ones that replace them.
            options.afterwards()

        if copied is None:
            if had_copy:
                say(f"checkpoints: {self.describe()}")
            write()
            return
        # The interpreter waits for an executor's thread before it exits, even after an error, so that the file is
        # complete.
        executor = ThreadPoolExecutor(1, "checkpoint-writer")
        self._write = executor.submit(write)
        executor.shutdown(wait=False)

    def raise_error(self) -> None:
        """Raise the error of a write that has failed, once; do not wait for one in flight."""
        if self._write is not None and self._write.done():
            ended, self._write = self._write, None
            ended.result()

    def join(self) -> None:
        """Wait for the write in flight without raising its error. This may be called from any thread."""
        if (write := self._write) is not None:
            wait([write])

    def wait(self) -> None:
        """Wait for the write in flight; raise its error."""
        self.join()
        self.raise_error()

    def teardown(self) -> None:
        """Wait for the write in flight, and report its error.

        After a training that ended normally there is none. If an error ended training, that error is the one to raise.
        """
        try:
            self.wait()
        except Exception as error:
            message = user_message(error) or f"{type(error).__name__}: {error}"
            say(f"warning: the last checkpoint was not written: {message}")
        self.copy.release()
        super().teardown()


def checkpoint_io(trainer: Trainer) -> AtomicCheckpointIO:
    """Return the object that writes a trainer's checkpoints."""
    writer = trainer.strategy.checkpoint_io
    assert isinstance(writer, AtomicCheckpointIO)
    return writer
