"""A DataLoader that saves its position, so that training resumes at the exact batch.

It is endless: it goes from one epoch's plan to the next with the same workers. Its state is (epoch, next global batch),
which does not depend on the number of ranks, so that any number of ranks can resume from it.
"""

import sys
import time
from collections.abc import Callable, Iterator
from typing import TypedDict

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from data_module.batch import RankBatch, RowShape, SpecialIds, collate
from data_module.batch_plan import Epoch, Epochs
from data_module.rank_rows import rank_rows
from data_module.system.worker_processes import ignore_signals, signals_blocked

NEVER_ENDS = 1 << 40
"""The length of an endless loader. With a length, Lightning does not fetch batches in advance."""


class Position(TypedDict):
    """The position that training resumes from: the same on every rank, for any number of ranks."""

    epoch: int
    next_batch: int


class RankBatchDataset(Dataset[RankBatch]):
    """One rank's part of every global batch from a given position on, epoch after epoch.

    All work is done in `__getitem__`, in a worker process if there are any; the training process only receives tensors.
    The corpus is memory-mapped, so that processes share its pages; each process plans its epochs itself.
    """

    def __init__(self, epochs: Epochs, special: SpecialIds, *, rank: int, world_size: int, shape: RowShape) -> None:
        """Store the arguments and read nothing yet. Item 0 is the first batch until `seek` is called."""
        self._epochs, self._special = epochs, special
        self.rank, self._world_size, self._shape = rank, world_size, shape
        self.seek(0, 0)

    def seek(self, epoch: int, batch: int) -> None:
        """Make item 0 the global batch with index `batch` of epoch `epoch`."""
        self._current: Epoch | None = None
        self._epoch = epoch
        self._first_item = -batch  # the item of the epoch's first batch

    def __getitem__(self, item: int) -> RankBatch:
        """Return this rank's part of the global batch `item` batches after the position. Items only increase."""
        if self._current is None:
            self._current = self._epochs.get(self._epoch)
        # Workers take items in turn, so one may skip an epoch.
        while item - self._first_item >= len(self._current.plan):
            self._first_item += len(self._current.plan)
            self._epoch += 1
            self._current = None  # Else two plans would be in memory at once.
            self._current = self._epochs.get(self._epoch)
        corpus, plan = self._current
        index = item - self._first_item
        pairs = plan[index]
        rows = rank_rows(*corpus.lengths(pairs), self._shape, self._world_size, self.rank)
        return collate(
            corpus,
            [pairs[row] for row in rows],
            self._special,
            self._shape,
            num_target_tokens=plan.target_tokens(index),
            epoch=self._epoch,
            index=index,
            num_batches=len(plan),
        )


class StatefulLoader(DataLoader[RankBatch]):
    """Yields this rank's `RankBatch` of one optimizer step after another, endlessly."""

    def __init__(self, dataset: RankBatchDataset, *, workers: int, pin_memory: bool) -> None:
        """Start no worker yet: they are forked when iteration begins. Without any, this process makes the batches.

        The loader moves the dataset to its own position. With `pin_memory`, batches are copied to page-locked memory,
        for asynchronous copies to a GPU.
        """
        super().__init__(
            dataset,
            sampler=range(NEVER_ENDS),
            batch_size=None,
            num_workers=workers,
            pin_memory=pin_memory,
            worker_init_fn=ignore_signals,
            prefetch_factor=4 if workers else None,
            # Creating an iterator draws from the generator, which must not advance the global one.
            generator=torch.Generator().manual_seed(0),
        )
        self._rank_batches = dataset
        self._position = (0, 0)
        self.on_wait: Callable[[str], None] = lambda _: None
        """Called with "data_wait" before waiting for a batch, and with "loop_overhead" after."""

    def __iter__(self) -> Iterator[RankBatch]:  # type: ignore[override]
        """Yield batches from the position on, endlessly."""
        self._rank_batches.seek(*self._position)
        # The process group's threads get time to release the tensors of the last collective. For that, a thread takes a
        # lock of the interpreter. Python 3.11 does not reset this lock in a forked child (3.12 does), so a worker that
        # is forked while the lock is held waits for it forever. On an idle machine the threads need a few microseconds.
        if sys.version_info < (3, 12) and dist.is_initialized():
            time.sleep(0.1)
        with signals_blocked():
            batches = super().__iter__()
        while True:
            self.on_wait("data_wait")
            batch = next(batches)
            self.on_wait("loop_overhead")
            # Workers are several batches ahead. The position counts only what training has received, so that a resumed
            # run neither repeats nor skips a batch.
            self._position = (batch.epoch, batch.index + 1)
            yield batch

    def __len__(self) -> int:
        return NEVER_ENDS

    def state_dict(self) -> Position:
        """Return the position to resume from."""
        return {"epoch": self._position[0], "next_batch": self._position[1]}

    def load_state_dict(self, state: Position) -> None:
        """Resume from a position. The time this takes does not depend on the position."""
        self._position = (state["epoch"], state["next_batch"])
