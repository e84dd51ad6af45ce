"""The stateful loader: what each rank gets, and that it resumes at its position."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import time
import weakref
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import Dataset
from torch.utils.data._utils.signal_handling import _set_worker_signal_handlers

from data_module import stateful_loader
from data_module.batch import RankBatch, SpecialIds
from data_module.batch_plan import Epoch, EpochPlan, Epochs
from data_module.corpus.store import open_corpus
from data_module.rank_rows import row_shape
from data_module.stateful_loader import RankBatchDataset, StatefulLoader
from data_module.tokenization.tokenizer import Tokenizer

SPECIAL = SpecialIds(pad=0, bos=2, eos=3)


def dataset(folder: Path, plans: Epochs, rank: int = 0, world_size: int = 1) -> RankBatchDataset:
    corpus = open_corpus(folder, "train")
    means = (1.0 + len(corpus.source.tokens) / 300, 1.0 + len(corpus.target.tokens) / 300)
    options = {"batch_tokens": 400, "max_tokens_per_device": None}
    shape = row_shape(means, 1 + corpus.longest, world_size=world_size, **options)
    return RankBatchDataset(plans, SPECIAL, rank=rank, world_size=world_size, shape=shape)


def loader(folder: Path, workers: int = 0, rank: int = 0, world_size: int = 1) -> StatefulLoader:
    plans = Epochs([open_corpus(folder, "train")], batch_tokens=400, seed=1)
    return StatefulLoader(dataset(folder, plans, rank, world_size), workers=workers, pin_memory=False)


def pairs(rank_batch: RankBatch) -> list[int]:
    found: list[int] = rank_batch.pairs.tolist()
    return found


def sentences(ids: torch.Tensor) -> list[list[int]]:
    """Return the sentences of a row, without EOS."""
    found: list[list[int]] = [[]]
    for piece in ids.tolist():
        if piece == SPECIAL.eos:
            found.append([])
        elif piece != SPECIAL.pad:
            found[-1].append(piece)
    assert found[-1] == []
    return found[:-1]


def test_batches_contain_the_corpus(tiny_corpus: Path) -> None:
    tokenizer = Tokenizer.load(tiny_corpus / "tokenizer.model")
    texts = {side: (tiny_corpus.parent / f"train.{side}").read_text().splitlines() for side in ("source", "target")}
    for rank_batch in islice(loader(tiny_corpus), 8):
        [batch] = rank_batch.micro_batches
        for side, row in (("source", batch.source), ("target", batch.target_output)):
            found = tokenizer.decode(sentences(row))
            assert sorted(found) == sorted(texts[side][pair] for pair in rank_batch.pairs)
        labels = batch.target_output.tolist()
        for given, before, label in zip(batch.target_input.tolist(), [None, *labels], labels, strict=False):
            assert given == SPECIAL.pad if label == SPECIAL.pad else given in (before, SPECIAL.bos)
        assert (batch.target_input == SPECIAL.bos).sum() == len(rank_batch.pairs)
        assert rank_batch.num_target_tokens == int((batch.target_output != SPECIAL.pad).sum())


@pytest.mark.parametrize("workers", [0, 2])
def test_resumes_at_the_exact_batch(tiny_corpus: Path, workers: int) -> None:
    whole = [pairs(rank_batch) for rank_batch in islice(loader(tiny_corpus), 60)]
    epoch_length = next(iter(loader(tiny_corpus))).num_batches
    assert 2 * epoch_length < 60  # the loop below crosses epochs
    state, resumed = None, []
    for steps in (3, epoch_length - 3, 1, epoch_length + 2, 5):
        part = loader(tiny_corpus, workers)
        if state is not None:
            part.load_state_dict(state)
        resumed += [pairs(rank_batch) for rank_batch in islice(part, steps)]
        state = part.state_dict()
    assert resumed == whole[: len(resumed)]


def test_without_a_position_a_dataset_begins_at_the_first_batch(tiny_corpus: Path) -> None:
    plans = Epochs([open_corpus(tiny_corpus, "train")], batch_tokens=400, seed=1)
    first = dataset(tiny_corpus, plans)[0]
    assert isinstance(first, RankBatch)
    assert (first.epoch, first.index) == (0, 0)


def test_a_plan_is_gone_before_the_next_one_is_made(tiny_corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[EpochPlan]] = []
    get = Epochs.get

    def record(self: Epochs, epoch: int) -> Epoch:
        assert not [plan for plan in made if plan()]
        found = get(self, epoch)
        made.append(weakref.ref(found.plan))
        return found

    monkeypatch.setattr(Epochs, "get", record)
    list(islice(loader(tiny_corpus), 40))
    assert len(made) > 1


def test_epochs_differ_and_contain_every_pair(tiny_corpus: Path) -> None:
    rank_batches = list(islice(loader(tiny_corpus), 40))
    epochs = [[p for s in rank_batches if s.epoch == epoch for p in pairs(s)] for epoch in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(300))
    assert epochs[0] != epochs[1]
    for epoch in (0, 1):
        of_epoch = [rank_batch for rank_batch in rank_batches if rank_batch.epoch == epoch]
        assert [rank_batch.index for rank_batch in of_epoch] == list(range(len(of_epoch)))
        assert {rank_batch.num_batches for rank_batch in of_epoch} == {len(of_epoch)}


def test_ranks_divide_each_step_and_have_the_same_position(tiny_corpus: Path) -> None:
    alone = islice(loader(tiny_corpus), 12)
    ranks = [loader(tiny_corpus, rank=rank, world_size=3) for rank in range(3)]
    for whole, *parts in zip(alone, *[islice(rank, 12) for rank in ranks], strict=True):
        assert sorted(pairs(whole)) == sorted(p for part in parts for p in pairs(part))
        assert {part.num_target_tokens for part in parts} == {whole.num_target_tokens}
    assert ranks[0].state_dict() == ranks[2].state_dict()


def test_on_wait_is_called_before_and_after_waiting(tiny_corpus: Path) -> None:
    events = []
    rank_batches = loader(tiny_corpus)
    make = rank_batches.dataset.__getitem__

    class Recording(Dataset[RankBatch]):
        def seek(self, epoch: int, batch: int) -> None:
            rank_batches.dataset.seek(epoch, batch)

        def __getitem__(self, item: int) -> RankBatch:
            events.append("made")
            return make(item)

    recording = StatefulLoader(Recording(), workers=0, pin_memory=False)
    recording.on_wait = events.append
    list(islice(recording, 2))
    assert events == ["data_wait", "made", "loop_overhead"] * 2


def test_a_worker_ignores_signals_except_from_the_training_process(tiny_corpus: Path) -> None:
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
        for kind in (None, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM):
            if kind is not None:
                subprocess.run(["kill", f"-{kind.name[3:]}", str(worker.pid)], check=True)
            while True:  # until it has been delivered: a second pending signal of the same kind would be lost
                status = Path(f"/proc/{worker.pid}/status").read_text()
                if not any(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("ShdPnd")):
                    break
                time.sleep(0.01)
            here.send(kind)
            assert multiprocessing.connection.wait([here, worker.sentinel]) == [here]
            assert here.recv() == kind
        os.kill(worker.pid or 0, signal.SIGTERM)
        worker.join()
        assert worker.exitcode == 0
    finally:
        worker.kill()
        worker.join()


@pytest.mark.parametrize(
    ("version", "has_process_group", "pauses"),
    [((3, 11, 9), True, 1), ((3, 11, 9), False, 0), ((3, 12, 0), True, 0)],
)
def test_python_3_11_pauses_before_workers_are_forked_from_a_rank(
    tiny_corpus: Path, monkeypatch: pytest.MonkeyPatch, version: tuple[int, ...], has_process_group: bool, pauses: int
) -> None:
    """There a thread of the process group may hold a lock that a forked worker would wait for, for ever."""
    slept: list[float] = []
    monkeypatch.setattr(stateful_loader, "sys", SimpleNamespace(version_info=version))
    monkeypatch.setattr(stateful_loader, "time", SimpleNamespace(sleep=slept.append))
    monkeypatch.setattr(stateful_loader, "dist", SimpleNamespace(is_initialized=lambda: has_process_group))
    next(iter(loader(tiny_corpus)))
    assert len(slept) == pauses


def test_the_global_generator_is_not_advanced(tiny_corpus: Path) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    for workers in (0, 2):
        list(islice(loader(tiny_corpus, workers), 3))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_signal_while_a_worker_starts(tiny_corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch installs a terminating handler in each worker just before it calls `worker_init_fn`."""
    begin = _set_worker_signal_handlers

    def begin_and_be_signalled() -> None:
        begin()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGHUP)

    monkeypatch.setattr(torch.utils.data._utils.signal_handling, "_set_worker_signal_handlers", begin_and_be_signalled)
    assert len(list(islice(loader(tiny_corpus, workers=2), 5))) == 5
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert not blocked & {signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT}
