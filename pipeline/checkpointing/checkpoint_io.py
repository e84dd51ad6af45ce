"""Writes checkpoints in the background, from a copy in host memory."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import TorchCheckpointIO
from torch import Tensor

from data_module.files import PlainValues
from pipeline.checkpointing.checkpoint import write_atomic
from pipeline.runtime.console import say, user_message
from pipeline.runtime.memory import can_measure_peak, host_memory_limit, private_memory, release_freed_memory


def host_copy(contents: PlainValues) -> PlainValues:
    """Return a copy of a checkpoint's contents in host memory.

    Tensors that share memory, such as tied weights, share it in the copy and in the file.
    """
    copies: dict[int, torch.UntypedStorage] = {}
    copied: dict[int, object] = {}
    for one in _tensors(contents):
        storage = one.untyped_storage()
        if (key := storage.data_ptr()) not in copies:
            copies[key] = torch.UntypedStorage(storage.nbytes()).copy_(storage)
        place = copies[key], one.storage_offset(), one.shape, one.stride()
        copied[id(one)] = torch.empty(0, dtype=one.dtype).set_(*place)
    return deepcopy(contents, copied)


def _tensors(value: object) -> Iterator[Tensor]:
    """Yield the plain tensors in nested values."""
    if type(value) is Tensor and value.layout == torch.strided and value.numel():
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


@dataclass(frozen=True)
class WriteOptions:
    """What to do besides writing a checkpoint; passed as Lightning's `storage_options`."""

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
        self.copy_bytes = 0
        """Host memory that a copy may take; 0 if checkpoints are written in the foreground."""
        self._processes = 1
        self._refusal = "no memory was reserved"
        self._write: Future[None] | None = None
        """The write in flight, or a failed one whose error has not been raised yet."""

    def reserve(self, size: int, processes: int) -> None:
        """Write in the background from now on if the host has room for a copy of `size` bytes.

        The memory is taken when a checkpoint is copied; `MemoryProbe` counts it. `processes` share the node's memory.
        """
        self.copy_bytes, self._processes = 0, processes
        if not can_measure_peak():
            self._refusal = "this system does not report how much memory a process uses"
            return
        limit = host_memory_limit(processes)
        self._refusal = f"a copy of {size / 1e6:,.0f} MB does not fit, {limit.owner} has {limit.size / 1e6:,.0f} MB"
        if private_memory() + size <= limit.size:
            self.copy_bytes = size

    def release(self) -> None:
        """Write in the foreground from now on: a copy does not fit beside the micro-batches."""
        if self.copy_bytes:
            self._refusal = f"the micro-batches and a copy of {self.copy_bytes / 1e6:,.0f} MB do not fit together"
        self.copy_bytes = 0

    def describe(self) -> str:
        """Say how checkpoints are written, for the line that `fit` prints at its start."""
        if self.copy_bytes:
            return f"written in the background from a copy in memory of {self.copy_bytes / 1e6:,.0f} MB"
        return f"training waits while they are written: {self._refusal}"

    def _copied(self, contents: PlainValues) -> PlainValues | None:
        """Return a copy of a checkpoint's contents; None if there is no room."""
        if not self.copy_bytes:
            return None
        # Memory that `keep_freed_memory` keeps may have no gap for the copy, which would then come on top of it.
        release_freed_memory()
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in _tensors(contents)}
        if (needed := sum(storages.values())) > self.copy_bytes:  # An optimizer has more state than Adam.
            self.reserve(needed, self._processes)
            say(f"checkpoints: {self.describe()}")
        return host_copy(contents) if self.copy_bytes else None

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
        # There is room for one copy, so the previous one must be on disk. Its error ends the run here: a run that went
        # on with a full disk would have ever older checkpoints.
        self.wait()
        copied = self._copied(checkpoint)

        def write() -> None:
            for file in files:
                write_atomic(checkpoint if copied is None else copied, file)
            # `afterwards` removes old checkpoints. It comes last, so that a process killed at any moment leaves them or
            # the ones that replace them.
            options.afterwards()

        if copied is None:
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
        super().teardown()


def checkpoint_io(trainer: Trainer) -> AtomicCheckpointIO:
    """Return the object that writes a trainer's checkpoints."""
    writer = trainer.strategy.checkpoint_io
    assert isinstance(writer, AtomicCheckpointIO)
    return writer
