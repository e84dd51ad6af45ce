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

from data_module.system.files import PlainValues
from pipeline.checkpointing.checkpoint import write_atomic
from pipeline.runtime.console import say, user_message
from pipeline.runtime.memory import can_measure_peak, host_memory_limit, private_memory, release_freed_memory


class HostCopy:
    """Host memory to which a checkpoint's tensors are copied until they are written.

    It is allocated at the first copy: loaders have been forked by then, and do not keep pages of earlier copies.
    """

    def __init__(self) -> None:
        self.size = 0
        """Bytes that are planned for the copy; 0 if there is no room."""
        self.wanted, self._processes = 0, 1
        self._storages: list[torch.UntypedStorage] = []

    def plan(self, size: int, processes: int) -> None:
        """Plan a copy of `size` bytes if there is room beside what this process has; `processes` share the node's."""
        self.release()
        self.wanted, self._processes = size, processes
        if can_measure_peak() and private_memory() + size <= host_memory_limit(processes).size:
            self.size = size

    def release(self) -> None:
        """Give the memory back and plan no copy. No copy may be in use."""
        self.size, self._storages = 0, []
        release_freed_memory()

    def take(self, contents: PlainValues) -> PlainValues | None:
        """Return a copy of a checkpoint's contents, which is valid until the next call; None if there is no room.

        An optimizer with more state than Adam needs more memory than was planned, for which a new plan is made here.
        """
        # Tensors that share memory, such as tied weights, share it in the copy and in the file.
        tensors = list(_tensors(contents))
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in tensors}
        sizes = [storage.nbytes() for storage in storages.values()]
        if self.size and sum(sizes) > self.size:
            self.plan(sum(sizes), self._processes)
        if not self.size:
            return None
        if [storage.nbytes() for storage in self._storages] != sizes:
            self._storages.clear()
            try:
                self._storages += (torch.empty(size, dtype=torch.uint8).untyped_storage() for size in sizes)
            except RuntimeError:  # PyTorch's error where the system gives a process no more memory
                self.release()
                return None
        copies = dict(zip(storages, self._storages, strict=True))
        for key, storage in storages.items():
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


@dataclass(frozen=True)
class WriteOptions:
    """What to do besides writing a checkpoint; passed as Lightning's `storage_options`."""

    copies: tuple[Path, ...] = ()
    """Other files with the same contents, written before the checkpoint itself."""
    afterwards: Callable[[], None] = lambda: None
    """Called when all files have their final names."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write Lightning's checkpoints under a temporary name, then rename them.

    After `copy.plan`, training waits only until the contents are copied to host memory; a thread then writes them.
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
        self.copy.release()

    def describe(self) -> str:
        """Say how checkpoints are written, for the line that `fit` prints at its start."""
        if self.copy.size:
            return f"written in the background from a copy in memory of {self.copy.size / 1e6:,.0f} MB"
        return f"training waits while they are written: no memory for a copy of {self.copy.wanted / 1e6:,.0f} MB"

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
