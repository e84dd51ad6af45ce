"""A DataLoader that knows what it has handed out, so that training goes on at the exact batch.

It never ends: one epoch's plan follows another, workers stay, and counters are in optimizer steps. Its state is
(epoch, next global batch) and says nothing of ranks, so that any number of them can go on from it.
"""

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from data_module.batching.batch import RankBatch, SpecialIds, collate
from data_module.batching.batch_plan import EpochPlan, rank_batch
from data_module.batching.plan_cache import PlanCache
from data_module.corpus.store import ParallelCorpus

NEVER_ENDS = 1 << 40
"""What `len` says of an endless loader; with a length Lightning fetches nothing in advance."""


class RankBatchDataset(Dataset[RankBatch]):
    """One rank's share of every global batch from a position on, epoch after epoch.

    All work is done where an item is asked for, in a worker process if there are any: the trainer's own process
    only receives tensors. Corpus and plan are memory-mapped, so that processes share their pages.
    """

    def __init__(
        self,
        corpus: ParallelCorpus,
        plans: PlanCache,
        special: SpecialIds,
        *,
        rank: int,
        world_size: int,
        max_tokens: int,
    ) -> None:
        self._corpus, self._plans, self._special = corpus, plans, special
        self._rank, self._world_size, self._max_tokens = rank, world_size, max_tokens
        self.seek(0, 0)

    def seek(self, epoch: int, batch: int) -> None:
        """Make item 0 this epoch's global batch of that index."""
        self._plans.forget()
        self._plan: EpochPlan | None = None
        self._epoch, self._first_item = epoch, -batch

    def __getitem__(self, item: int) -> RankBatch:
        """The share of the global batch `item` places after the one sought; to be asked for in rising order."""
        if self._plan is None:
            self._plan = self._plans.of(self._epoch)
        while item - self._first_item >= len(self._plan):
            self._first_item += len(self._plan)
            self._epoch += 1
            self._plan = self._plans.of(self._epoch)
        index = item - self._first_item
        groups = self._plan[index]
        share = rank_batch(groups, self._rank, self._world_size, self._max_tokens)
        company = [groups[0]._replace(pairs=groups[0].pairs[:1])]
        return collate(
            self._corpus,
            share or company,
            self._special,
            num_target_tokens=self._plan.target_tokens(index),
            is_filler=not share,
            epoch=self._epoch,
            index=index,
            num_batches=len(self._plan),
        )


class _Forever(Sampler[int]):
    """0, 1, 2 and so on."""

    def __iter__(self) -> Iterator[int]:
        return itertools.count()

    def __len__(self) -> int:
        return NEVER_ENDS


class StatefulLoader(DataLoader[RankBatch]):
    """Yields this rank's `RankBatch` of one optimizer step after another, for ever."""

    def __init__(self, dataset: RankBatchDataset, *, workers: int, pin_memory: bool) -> None:
        super().__init__(
            dataset,
            sampler=_Forever(),
            batch_size=None,
            num_workers=workers,
            collate_fn=identity,  # type: ignore[arg-type]
            pin_memory=pin_memory,
            worker_init_fn=_leave_signals_to_trainer,
            prefetch_factor=4 if workers else None,
            # A generator of its own: making an iterator draws from it, and must not move the global one.
            generator=torch.Generator().manual_seed(0),
        )
        self._shares = dataset
        self._handed_out = (0, 0)
        self.on_wait: Callable[[str], None] | None = None
        """Told "data_wait" where waiting for a share begins, and "between" where it ends."""

    def check_worker_number_rationality(self) -> None:
        """Accept any number of workers.

        PyTorch warns, on every rank, of more workers than processors. Here workers share a fixed amount of work and
        sleep most of the time, so that more of them than processors slow nothing down.
        """

    def __iter__(self) -> Iterator[RankBatch]:  # type: ignore[override]
        self._shares.seek(*self._handed_out)
        with signals_blocked():
            shares = super().__iter__()
        while True:
            self._say("data_wait")
            share = next(shares)
            self._say("between")
            # Counted when handed out, not when a worker fetched it in advance.
            self._handed_out = (share.epoch, share.index + 1)
            yield share

    def _say(self, what: str) -> None:
        if self.on_wait is not None:
            self.on_wait(what)

    def __len__(self) -> int:
        return NEVER_ENDS

    def state_dict(self) -> dict[str, Any]:
        """The position to go on from; the same on every rank and for any number of them."""
        return {"epoch": self._handed_out[0], "next_batch": self._handed_out[1]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position; seeking costs nothing that grows with it."""
        self._handed_out = (state["epoch"], state["next_batch"])


def identity(share: RankBatch) -> RankBatch:
    """What collates batches that come collated."""
    return share


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Let processes begin with SLURM's signals held back, which come to them too and would end them.

    The loader's workers then see to it themselves, in `_leave_signals_to_trainer`.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave_signals_to_trainer(_worker: int) -> None:
    """Heed no signal but the trainer's own.

    SLURM sends its warnings, and a terminal Ctrl-C, to workers as well: one that died of it would take the trainer
    with it before that has saved. The trainer ends its workers by SIGTERM, when they do not end by themselves.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not hasattr(signal, "sigwaitinfo"):  # no Linux, no SLURM
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_when_told, args=(os.getppid(),), daemon=True).start()


def _end_when_told(trainer: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != trainer:
        pass
    os._exit(0)
