"""Collation, compared with arrays written by hand; and batches of sentences of similar lengths."""

import math
import random
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch

from data_module.batch import (
    RankBatch,
    RowShape,
    SpecialIds,
    collate,
    length_batches,
    length_groups,
    pad_batch,
)
from data_module.corpus.store import ParallelCorpus, TokenStore, TokenStoreWriter
from data_module.rank_rows import row_shape

SPECIAL = SpecialIds(pad=0, bos=2, eos=3)
SOURCE = [[15, 16], [17], [18, 19, 10], [11]]
TARGET = [[21], [22, 23, 24], [25, 26], []]
SHAPE = RowShape(source_tokens=14, target_tokens=12, sentences=5, longest=4, per_rank=2)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> ParallelCorpus:
    folder = tmp_path_factory.mktemp("stores")
    for side, sentences in (("source", SOURCE), ("target", TARGET)):
        with TokenStoreWriter(folder / side, np.dtype(np.uint16)) as writer:
            writer.append_flat(np.concatenate(sentences).astype(np.int64), np.array(list(map(len, sentences))))
    return ParallelCorpus(TokenStore(folder / "source"), TokenStore(folder / "target"), "", 3)


def collated(corpus: ParallelCorpus) -> RankBatch:
    rows = [np.array([0, 2]), np.array([3])]
    return collate(corpus, rows, SPECIAL, SHAPE, num_target_tokens=99, epoch=5, index=6, num_batches=7)


def test_sentences_end_to_end(corpus: ParallelCorpus) -> None:
    """The longest first."""
    batch = collated(corpus)
    first, second = batch.micro_batches
    assert first.source.tolist() == [18, 19, 10, 3, 15, 16, 3, 0, 0, 0, 0, 0, 0, 0]
    assert first.source_positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0]
    assert first.target_input.tolist() == [2, 25, 26, 2, 21, 0, 0, 0, 0, 0, 0, 0]
    assert first.target_output.tolist() == [25, 26, 3, 21, 3, 0, 0, 0, 0, 0, 0, 0]
    assert first.target_positions.tolist() == [0, 1, 2, 0, 1, 0, 0, 0, 0, 0, 0, 0]
    # Seven tokens of padding on both sides make two sentences of at most four.
    assert first.source_offsets.tolist() == [0, 4, 7, 11, 14, 14]
    assert first.target_offsets.tolist() == [0, 3, 5, 9, 12, 12]
    assert second.source.tolist() == [11, 3, *[0] * 12]
    assert second.target_input.tolist() == [2, *[0] * 11]
    assert second.target_output.tolist() == [3, *[0] * 11]
    assert second.source_offsets.tolist() == [0, 2, 6, 10, 14, 14]
    assert second.target_offsets.tolist() == [0, 1, 5, 9, 12, 12]
    assert (first.groups, second.groups, first.longest) == ([(2, 4, 3)], [(1, 2, 1)], 4)
    assert batch.flat.dtype == torch.int32
    assert batch.pairs.tolist() == [2, 0, 3]
    assert (batch.num_target_tokens, batch.epoch, batch.index, batch.num_batches) == (99, 5, 6, 7)
    assert batch.num_tokens == (4 + 3) + (3 + 2) + (2 + 1)
    assert batch.num_row_tokens == 2 * (14 + 12)


def test_rows_as_long_as_their_sentences_need(corpus: ParallelCorpus) -> None:
    """Up to 16 tokens more; 16 tokens of padding make as many sentences of at most four as they take."""
    shape = RowShape(source_tokens=64, target_tokens=64, sentences=10, longest=4, per_rank=1, constant=False)
    rows = [np.array([2, 0]), np.array([2, 0, 1, 3, 2, 2]), np.array([], np.int64)]
    first, second, third = collate(corpus, rows, SPECIAL, shape, num_target_tokens=9).micro_batches
    assert first.source.tolist() == [18, 19, 10, 3, 15, 16, 3, *[0] * 9]
    assert first.target_output.tolist() == [25, 26, 3, 21, 3, *[0] * 11]
    assert first.source_offsets.tolist() == [0, 4, 7, 10, 13, 16, 16, 16, 16, 16, 16]
    assert first.target_offsets.tolist() == [0, 3, 5, 9, 13, 16, 16, 16, 16, 16, 16]
    assert [row.numel() for row in (second.source, second.target_input, third.source)] == [32, 32, 16]


def test_a_rank_without_pairs_has_padding_only(corpus: ParallelCorpus) -> None:
    """One group of a token of padding, so that plain attention has gradients for DDP to reduce."""
    batch = collate(corpus, [np.array([], np.int64)], SPECIAL, SHAPE, num_target_tokens=9)
    [one] = batch.micro_batches
    assert one.target_output.unique().tolist() == [0]
    assert one.source_offsets.tolist() == [0, 4, 7, 11, 14, 14]
    assert one.groups == [(1, 1, 1)]
    assert (batch.num_tokens, batch.num_target_tokens) == (0, 9)


def test_groups_of_similar_length() -> None:
    """By the longer side. A pair is in a group with one up to a quarter longer, or up to four tokens longer."""
    source = np.array([100, 80, 79, 64, 63, 12, 10, 8, 7, 3, 1, 1])
    target = np.array([90, 30, 79, 60, 50, 12, 10, 6, 2, 2, 1, 1])
    groups = [(2, 100, 90), (2, 79, 79), (1, 63, 50), (3, 12, 12), (2, 7, 2), (2, 1, 1)]
    assert length_groups(source, target) == groups
    assert length_groups(target, source) == [(count, second, first) for count, first, second in groups]
    rng = np.random.default_rng(1)
    lengths = -np.sort(-rng.integers(1, 300, (2, 1000)).max(0))
    groups = length_groups(lengths, lengths)
    assert sum(group.num_pairs for group in groups) == len(lengths)
    padded = sum(group.num_pairs * group.longest_source**2 for group in groups)
    assert padded <= 1.5 * (lengths**2).sum()
    assert len(groups) < 25


@pytest.mark.parametrize("mean_length", [2.0, 2.2, 2.4, 3.0])
def test_tensors_begin_at_16_bytes(corpus: ParallelCorpus, mean_length: float) -> None:
    """Inductor copies others."""
    options = {"batch_tokens": 300, "max_tokens_per_device": 128, "world_size": 1}
    shape = row_shape((mean_length, mean_length), 4, **options)
    batch = collate(corpus, [np.array([2, 0]), np.array([3]), np.array([1])], SPECIAL, shape, num_target_tokens=9)
    tensors = [value for one in batch.micro_batches for value in vars(one).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 3 * 7
    assert {tensor.storage_offset() * tensor.itemsize % 16 for tensor in tensors} == {0}


def test_a_batch_is_moved_to_a_device(corpus: ParallelCorpus) -> None:
    batch = collated(corpus)
    moved = batch.to("meta")
    assert moved.flat.device.type == "meta"
    assert {**vars(moved), "flat": None} == {**vars(batch), "flat": None}


def test_a_batch_is_pickled_as_bytes(corpus: ParallelCorpus) -> None:
    """Shared memory would require a file descriptor of the sender, which may have exited."""
    batch = collated(corpus)
    received = ForkingPickler.loads(bytes(ForkingPickler.dumps(batch)))
    assert not batch.flat.is_shared()
    assert torch.equal(received.flat, batch.flat)
    assert torch.equal(received.pairs, batch.pairs)
    assert {**vars(received), "flat": None, "pairs": None} == {**vars(batch), "flat": None, "pairs": None}


def test_padding(corpus: ParallelCorpus) -> None:
    batch = pad_batch(corpus, np.array([2, 0]), SPECIAL)
    assert batch.pairs.tolist() == [2, 0]
    assert batch.source.tolist() == [[18, 19, 10, 3], [15, 16, 3, 0]]
    assert batch.source_mask is not None
    assert batch.source_mask.tolist() == [[True, True, True, True], [True, True, True, False]]
    assert batch.target_output.tolist() == [[25, 26, 3], [21, 3, 0]]
    assert [batch.target_input[0].tolist(), batch.target_input[1, :2].tolist()] == [[2, 25, 26], [2, 21]]
    assert not batch.is_filler
    moved = batch.to("meta")
    assert moved.source_mask is not None
    assert (moved.source.device.type, moved.source_mask.device.type) == ("meta", "meta")
    same_length = pad_batch(corpus, np.array([3, 1]), SPECIAL)
    assert same_length.source_mask is None
    assert same_length.to("meta").source_mask is None
    assert same_length.target_output.tolist() == [[3, 0, 0, 0], [22, 23, 24, 3]]
    # A filler has no labels.
    batch = pad_batch(corpus, np.array([3, 1]), SPECIAL, is_filler=True)
    assert batch.is_filler
    assert batch.target_output.unique().tolist() == [0]
    assert batch.source.tolist() == [[11, 3], [17, 3]]


def test_length_batches() -> None:
    draws = random.Random(2)
    lengths = [draws.randint(1, 30) for _ in range(1000)] + [900]
    batches = list(length_batches(lengths, 400))
    assert batches[0] == [1000]
    assert sorted(index for batch in batches for index in batch) == [i for i, one in enumerate(lengths) if one > 1]
    sizes = [(max(16, *(lengths[index] for index in batch)), len(batch)) for batch in batches]
    assert sizes == sorted(sizes, key=lambda size: -size[0])
    assert max(longest * count for longest, count in sizes[1:]) <= 400
    unmasked = sum(len({lengths[index] for index in batch}) == 1 for batch in batches)
    assert unmasked > len(batches) // 2
    # Hypotheses need memory as well, so the number of very short sentences is bounded.
    assert max(len(batch) for batch in length_batches([2] * 5000, 4096)) == 256
    assert list(length_batches([20] * 10, 100)) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert list(length_batches([20, 30, 1, 40], math.inf, 2)) == [[3, 1], [0]]
    assert list(length_batches([20, 30, 1, 40], 80)) == [[3], [1, 0]]
    assert list(length_batches([20, 30, 1, 40], 120, avoids_masks=False)) == [[3, 1, 0]]
