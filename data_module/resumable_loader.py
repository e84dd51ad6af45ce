"""A DataLoader that knows what it has handed out, so that training goes on at the exact batch.

It never ends: one epoch's plan follows another, workers stay, and counters are in optimizer steps. Its state is
(epoch, next global batch) and says nothing of ranks, so that any number of them can go on from it.
"""

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from data_module.batch import SpecialIds, StepShare, collate
from data_module.batch_plan import EpochPlan, Group, share_of_rank
from data_module.corpus import ParallelCorpus

NEVER_ENDS = 1 << 40
"""What `len` says of an endless loader; with a length Lightning fetches nothing in advance."""


@dataclass(frozen=True)
class ShareRequest:
    """What a worker is asked to collate."""

    groups: list[Group]
    weightless: bool
    """The rank has nothing to do and only keeps the others company."""
    num_target_tokens: int
    epoch: int
    index: int
    num_batches: int


class StepStream(Sampler[ShareRequest]):
    """One rank's share of every global batch from a position on, epoch after epoch."""

    def __init__(
        self,
        plan: Callable[[int], EpochPlan],
        corpus: ParallelCorpus,
        *,
        rank: int,
        world_size: int,
        max_tokens: int,
    ) -> None:
        self._plan = plan
        self._corpus = corpus
        self._rank, self._world_size, self._max_tokens = rank, world_size, max_tokens
        self.epoch, self.index = 0, 0

    def __iter__(self) -> Iterator[ShareRequest]:
        epoch, index = self.epoch, self.index
        while True:
            plan = self._plan(epoch)
            for batch in range(index, len(plan)):
                groups = plan[batch]
                tokens = sum(int(self._corpus.target.lengths[g.pairs].sum()) + len(g.pairs) for g in groups)
                share = share_of_rank(groups, self._rank, self._world_size, self._max_tokens)
                company = [groups[0]._replace(pairs=groups[0].pairs[:1])]
                yield ShareRequest(share or company, not share, tokens, epoch, batch, len(plan))
            epoch, index = epoch + 1, 0

    def __len__(self) -> int:
        return NEVER_ENDS


class ShareDataset(Dataset[StepShare]):
    """Turns a request into tensors, in a worker process; the corpus is memory-mapped anew in each."""

    def __init__(self, corpus: ParallelCorpus, special: SpecialIds) -> None:
        self._corpus = corpus
        self._special = special

    def __getitem__(self, request: ShareRequest) -> StepShare:
        return collate(
            self._corpus,
            request.groups,
            self._special,
            num_target_tokens=request.num_target_tokens,
            weightless=request.weightless,
            epoch=request.epoch,
            index=request.index,
            num_batches=request.num_batches,
        )


class ResumableLoader(DataLoader[StepShare]):
    """Yields this rank's `StepShare` of one optimizer step after another, for ever."""

    def __init__(self, dataset: ShareDataset, stream: StepStream, *, workers: int, pin_memory: bool) -> None:
        super().__init__(
            dataset,
            sampler=stream,
            batch_size=None,
            num_workers=workers,
            collate_fn=_as_it_is,  # type: ignore[arg-type]
            pin_memory=pin_memory,
            worker_init_fn=_reset_signals,
            prefetch_factor=4 if workers else None,
            # A generator of its own: making an iterator draws from it, and must not move the global one.
            generator=torch.Generator().manual_seed(0),
        )
        self._stream = stream
        self._handed_out = (stream.epoch, stream.index)

    def __iter__(self) -> Iterator[StepShare]:  # type: ignore[override]
        self._stream.epoch, self._stream.index = self._handed_out
        for share in super().__iter__():
            # Counted when handed out, not when a worker fetched it in advance.
            self._handed_out = (share.epoch, share.index + 1)
            yield share

    def __len__(self) -> int:
        return NEVER_ENDS

    def state_dict(self) -> dict[str, Any]:
        """The position to go on from; the same on every rank and for any number of them."""
        return {"epoch": self._handed_out[0], "next_batch": self._handed_out[1]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position; seeking costs nothing that grows with it."""
        self._handed_out = (state["epoch"], state["next_batch"])


def _as_it_is(share: StepShare) -> StepShare:
    return share


def _reset_signals(_worker: int) -> None:
    """Workers must die by the signals that the trainer handles, and leave its terminal's Ctrl-C to it."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if hasattr(signal, "SIGUSR1"):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
