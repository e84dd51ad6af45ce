"""Collation and the resumable loader: what a rank gets, and that it goes on where it stood."""

import multiprocessing
import os
import signal
import subprocess
import tempfile
import threading
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from torch.utils.data._utils.signal_handling import _set_worker_signal_handlers

from data_module.batching.batch import RankBatch, SpecialIds
from data_module.batching.batch_plan import EpochPlan
from data_module.batching.plan_cache import PlanCache
from data_module.batching.stateful_loader import RankBatchDataset, StatefulLoader
from data_module.corpus.store import open_corpus
from data_module.tokenization.tokenizer import Tokenizer

SPECIAL = SpecialIds(pad=0, bos=2, eos=3)


def loader(
    folder: Path, workers: int = 0, rank: int = 0, world_size: int = 1, group_tokens: int = 60
) -> StatefulLoader:
    corpus = open_corpus(folder, "train")
    plans = PlanCache(corpus, batch_tokens=400, group_tokens=group_tokens, seed=1)
    shares = RankBatchDataset(corpus, plans, SPECIAL, rank=rank, world_size=world_size, max_tokens=group_tokens)
    return StatefulLoader(shares, workers=workers, pin_memory=False)


def pairs(share: RankBatch) -> list[int]:
    return [pair for batch in share.micro_batches for pair in batch.pairs.tolist()]


def test_batches_hold_the_corpus(tiny_corpus: Path) -> None:
    tokenizer = Tokenizer.load(tiny_corpus / "tokenizer.model")
    texts = {side: (tiny_corpus.parent / f"train.{side}").read_text().splitlines() for side in ("source", "target")}
    masked = unmasked = 0
    for share in islice(loader(tiny_corpus, group_tokens=300), 8):
        for batch in share.micro_batches:
            assert tokenizer.decode(batch.source.tolist()) == [texts["source"][p] for p in batch.pairs]
            assert tokenizer.decode(batch.target_output.tolist()) == [texts["target"][p] for p in batch.pairs]
            for given, said in zip(batch.target_input.tolist(), batch.target_output.tolist(), strict=True):
                length = said.index(SPECIAL.eos)
                assert given[: length + 1] == [SPECIAL.bos, *said[:length]]
            if batch.source_mask is None:
                unmasked += 1
                assert (batch.source[:, -1] == SPECIAL.eos).all()
            else:
                masked += 1
                assert torch.equal(batch.source_mask, batch.source != SPECIAL.pad)
        said = sum(int((batch.target_output != SPECIAL.pad).sum()) for batch in share.micro_batches)
        assert share.num_target_tokens == said
    assert masked
    assert unmasked


@pytest.mark.parametrize("workers", [0, 2])
def test_goes_on_at_the_exact_batch(tiny_corpus: Path, workers: int) -> None:
    whole = [pairs(share) for share in islice(loader(tiny_corpus), 60)]
    epoch_length = next(iter(loader(tiny_corpus))).num_batches
    assert 2 * epoch_length < 60  # the walk below crosses epochs
    state, walked = None, []
    for steps in (3, epoch_length - 3, 1, epoch_length + 2, 5):
        part = loader(tiny_corpus, workers)
        if state is not None:
            part.load_state_dict(state)
        walked += [pairs(share) for share in islice(part, steps)]
        state = part.state_dict()
    assert walked == whole[: len(walked)]


def test_epochs_differ_and_hold_every_pair(tiny_corpus: Path) -> None:
    shares = list(islice(loader(tiny_corpus), 40))
    epochs = [[p for s in shares if s.epoch == epoch for p in pairs(s)] for epoch in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(300))
    assert epochs[0] != epochs[1]
    for epoch in (0, 1):
        of_epoch = [share for share in shares if share.epoch == epoch]
        assert [share.index for share in of_epoch] == list(range(len(of_epoch)))
        assert {share.num_batches for share in of_epoch} == {len(of_epoch)}


def test_ranks_share_each_step_and_the_position(tiny_corpus: Path) -> None:
    alone = islice(loader(tiny_corpus), 12)
    ranks = [loader(tiny_corpus, rank=rank, world_size=3) for rank in range(3)]
    for whole, *parts in zip(alone, *[islice(rank, 12) for rank in ranks], strict=True):
        assert sorted(pairs(whole)) == sorted(p for part in parts for p in pairs(part))
        assert {part.num_target_tokens for part in parts} == {whole.num_target_tokens}
    assert ranks[0].state_dict() == ranks[2].state_dict()
    # Two ranks go on where three stood.
    expected = [pairs(share) for share in islice(loader(tiny_corpus), 14)][12:]
    pair_of_ranks = [loader(tiny_corpus, rank=rank, world_size=2) for rank in range(2)]
    for rank in pair_of_ranks:
        rank.load_state_dict(ranks[0].state_dict())
    for whole, *parts in zip(expected, *[islice(rank, 2) for rank in pair_of_ranks], strict=True):
        assert sorted(whole) == sorted(p for part in parts for p in pairs(part))


def test_a_rank_with_nothing_keeps_company(tiny_corpus: Path) -> None:
    idle = next(iter(loader(tiny_corpus, rank=199, world_size=200, group_tokens=300)))
    assert [batch.target_output.unique().tolist() for batch in idle.micro_batches] == [[SPECIAL.pad]]
    assert len(pairs(idle)) == 1
    assert idle.num_target_tokens > 0
    plans = PlanCache(open_corpus(tiny_corpus, "train"), batch_tokens=400, group_tokens=300, seed=1)
    group = plans.get(0)[0][0]
    plans.discard_next()
    assert pairs(idle) == [group.pairs[0]]
    assert idle.shapes == [(1, group.source_length, group.target_length)]


def test_more_workers_than_processors(tiny_corpus: Path) -> None:
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(processors)})
    try:
        shares = [pairs(share) for share in islice(loader(tiny_corpus, workers=2), 3)]
    finally:
        os.sched_setaffinity(0, processors)
    assert shares == [pairs(share) for share in islice(loader(tiny_corpus), 3)]


def test_waiting_for_a_share_is_told(tiny_corpus: Path) -> None:
    told = []
    shares = loader(tiny_corpus)
    make = shares.dataset.__getitem__

    class Noting(Dataset[RankBatch]):
        def seek(self, epoch: int, batch: int) -> None:
            shares.dataset.seek(epoch, batch)

        def __getitem__(self, item: int) -> RankBatch:
            told.append("made")
            return make(item)

    noting = StatefulLoader(Noting(), workers=0, pin_memory=False)
    noting.on_wait = told.append
    list(islice(noting, 2))
    assert told == ["data_wait", "made", "between"] * 2


class Unhurried(PlanCache):
    """Computes the second epoch's plan only when it is waited for."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.waited_for = threading.Event()

    def compute(self, epoch: int) -> EpochPlan:
        if epoch:
            self.waited_for.wait()
        return super().compute(epoch)

    def discard_next(self) -> None:
        self.waited_for.set()
        super().discard_next()


def test_seeking_leaves_no_thread_behind(tiny_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker is a fork, which another thread does not survive."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    corpus = open_corpus(tiny_corpus, "train")
    plans = Unhurried(corpus, batch_tokens=400, group_tokens=60, seed=1)
    shares = RankBatchDataset(corpus, plans, SPECIAL, rank=0, world_size=1, max_tokens=60)
    plans.waited_for.clear()
    threads = set(threading.enumerate())
    try:
        shares[0]
        [computing] = set(threading.enumerate()) - threads
        assert computing.daemon, "a process that ends would wait for it"
        shares.seek(0, 1)
        assert set(threading.enumerate()) <= threads
    finally:
        plans.discard_next()


def test_a_worker_heeds_no_signal_but_the_trainers(tiny_corpus: Path) -> None:
    fork = multiprocessing.get_context("fork")
    begin = loader(tiny_corpus, workers=1).worker_init_fn
    assert begin is not None
    here, there = fork.Pipe()

    def work() -> None:
        begin(0)
        while True:
            there.send(there.recv())

    worker = fork.Process(target=work)
    worker.start()
    try:
        for kind in (None, signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):
            if kind is not None:
                subprocess.run(["kill", f"-{kind.name[3:]}", str(worker.pid)], check=True)
            for _ in range(1000):  # until it was delivered: of two pending signals of a kind one is lost
                status = Path(f"/proc/{worker.pid}/status").read_text()
                if not any(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("ShdPnd")):
                    break
                time.sleep(0.01)
            here.send(kind)
            assert here.poll(20)
            assert here.recv() == kind
        os.kill(worker.pid or 0, signal.SIGTERM)
        worker.join(timeout=20)
        assert worker.exitcode == 0
    finally:
        worker.kill()
        worker.join()


def test_the_global_generator_is_left_alone(tiny_corpus: Path) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    for workers in (0, 2):
        list(islice(loader(tiny_corpus, workers), 3))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_signal_while_a_worker_begins(tiny_corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch gives each worker a handler that ends it, just before the worker may say otherwise."""
    begin = _set_worker_signal_handlers

    def begin_and_be_signalled() -> None:
        begin()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)

    monkeypatch.setattr(torch.utils.data._utils.signal_handling, "_set_worker_signal_handlers", begin_and_be_signalled)
    assert len(list(islice(loader(tiny_corpus, workers=2), 5))) == 5
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT}
