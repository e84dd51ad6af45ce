"""Collation, compared with arrays written by hand."""

from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch

from data_module.batching.batch import RankBatch, SpecialIds, collate
from data_module.batching.batch_plan import LengthBucket
from data_module.corpus.store import ParallelCorpus, TokenStore, TokenStoreWriter

SPECIAL = SpecialIds(pad=0, bos=2, eos=3)
SOURCE = [[15, 16], [17], [18, 19, 10], [11]]
TARGET = [[21], [22, 23, 24], [25, 26], []]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> ParallelCorpus:
    folder = tmp_path_factory.mktemp("stores")
    for side, sentences in (("source", SOURCE), ("target", TARGET)):
        with TokenStoreWriter(folder / side, np.dtype(np.uint16)) as writer:
            writer.append_flat(np.concatenate(sentences).astype(np.int64), np.array(list(map(len, sentences))))
    return ParallelCorpus(TokenStore(folder / "source"), TokenStore(folder / "target"), "", 3)


def collated(corpus: ParallelCorpus, is_filler: bool = False) -> RankBatch:
    buckets = [LengthBucket(np.array([2, 0]), 4, 3), LengthBucket(np.array([3, 1]), 2, 4)]
    return collate(corpus, buckets, SPECIAL, num_target_tokens=99, is_filler=is_filler, epoch=5, index=6, num_batches=7)


def test_padding_and_special_ids(corpus: ParallelCorpus) -> None:
    batch = collated(corpus)
    first, second = batch.micro_batches
    assert first.pairs.tolist() == [2, 0]
    assert first.source.tolist() == [[18, 19, 10, 3], [15, 16, 3, 0]]
    assert first.source_mask is not None
    assert first.source_mask.tolist() == [[True, True, True, True], [True, True, True, False]]
    assert first.target_output.tolist() == [[25, 26, 3], [21, 3, 0]]
    assert [first.target_input[0].tolist(), first.target_input[1, :2].tolist()] == [[2, 25, 26], [2, 21]]
    assert second.pairs.tolist() == [3, 1]
    assert second.source.tolist() == [[11, 3], [17, 3]]
    assert second.source_mask is None
    assert second.target_output.tolist() == [[3, 0, 0, 0], [22, 23, 24, 3]]
    assert batch.ids.dtype == torch.int32
    assert (batch.num_target_tokens, batch.epoch, batch.index, batch.num_batches) == (99, 5, 6, 7)
    assert batch.num_tokens == (4 + 3) + (3 + 2) + (2 + 2) + (1 + 4)
    assert len(batch.ids) == 2 * (1 + 4 + 1 + 3) + 2 * (1 + 2 + 1 + 4)


def test_a_filler_batch_has_no_labels(corpus: ParallelCorpus) -> None:
    batch = collated(corpus, is_filler=True)
    assert batch.num_tokens == 0
    assert [one.target_output.unique().tolist() for one in batch.micro_batches] == [[0], [0]]
    assert batch.micro_batches[1].source.tolist() == [[11, 3], [17, 3]]


def test_the_defaults_are_those_of_validation(corpus: ParallelCorpus) -> None:
    """The first and only batch of epoch 0, with labels."""
    batch = collate(corpus, [LengthBucket(np.array([0]), 3, 2)], SPECIAL, num_target_tokens=2)
    assert (batch.epoch, batch.index, batch.num_batches, batch.is_filler) == (0, 0, 1, False)
    fields = {name: value for name, value in vars(batch).items() if name != "num_tokens"}
    assert (batch.num_tokens, RankBatch(**fields).num_tokens) == (5, 0)


def test_a_batch_is_moved_to_a_device(corpus: ParallelCorpus) -> None:
    batch = collated(corpus)
    moved = batch.to("meta")
    assert moved.ids.device.type == "meta"
    assert {**vars(moved), "ids": None} == {**vars(batch), "ids": None}


def test_a_batch_is_pickled_as_bytes(corpus: ParallelCorpus) -> None:
    """Shared memory would require a file descriptor of the sender, which may have exited."""
    batch = collated(corpus)
    received = ForkingPickler.loads(bytes(ForkingPickler.dumps(batch)))
    assert not batch.ids.is_shared()
    assert torch.equal(received.ids, batch.ids)
    assert {**vars(received), "ids": None} == {**vars(batch), "ids": None}
