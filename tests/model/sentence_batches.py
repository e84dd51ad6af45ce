"""Batches of random sentence pairs: packed for training, padded by plain loops for the reference."""

import random
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import parameters_to_vector
from torch.nn.utils.rnn import pad_sequence

from data_module.batch import PackedBatch, PaddedBatch, RankBatch, RowShape, SpecialIds, collate
from data_module.corpus.store import ParallelCorpus
from model.loss import label_smoothed_loss
from model.packed_attention import PLAIN_ATTENTION, RowAttention, RowSentences, packed_sentences
from model.transformer import PaddedTransformer, Transformer

PAD, BOS, EOS, VOCABULARY = 0, 1, 2, 50
SPECIAL = SpecialIds(pad=PAD, bos=BOS, eos=EOS)

Lengths = list[tuple[int, int]]
"""Source and target length of each pair, including the end symbol."""


def sentences(lengths: Lengths) -> list[tuple[list[int], list[int]]]:
    """Return random pairs of these lengths, without end symbols.

    The n-th pair of a source and a target length is always the same, whatever the other pairs are.
    """
    pairs, counts = [], Counter[tuple[int, int]]()
    for pair in lengths:
        counts[pair] += 1
        draws = random.Random(f"{pair} {counts[pair]}")
        source, target = ([draws.randrange(3, VOCABULARY) for _ in range(length - 1)] for length in pair)
        pairs.append((source, target))
    return pairs


def padded(lengths: Lengths, special: SpecialIds = SPECIAL) -> PaddedBatch:
    """Return the pairs as a padded batch, built sentence by sentence."""
    pairs = sentences(lengths)

    def rectangle(rows: list[list[int]]) -> Tensor:
        tensors = [torch.tensor(row, dtype=torch.int32) for row in rows]
        return pad_sequence(tensors, batch_first=True, padding_value=special.pad)

    source = rectangle([[*source, special.eos] for source, _ in pairs])
    return PaddedBatch(
        source=source,
        source_mask=source != special.pad if len({length for length, _ in lengths}) > 1 else None,
        target_input=rectangle([[special.bos, *target] for _, target in pairs]),
        target_output=rectangle([[*target, special.eos] for _, target in pairs]),
        pairs=torch.arange(len(pairs), dtype=torch.int32),
    )


def row_shape(micro_batches: list[Lengths]) -> RowShape:
    """Return a shape for these micro-batches, with more padding than the longest sentence has tokens, on both sides."""
    source, target = (max(sum(pair[side] for pair in one) for one in micro_batches) for side in (0, 1))
    longest = max((max(pair) for one in micro_batches for pair in one), default=1)
    sentences = max(map(len, micro_batches)) + 9
    return RowShape(source + 2 * longest, target + 3 * longest, sentences, longest, 1)


def packed(micro_batches: list[Lengths], shape: RowShape | None = None, **options: int) -> RankBatch:
    """Return the pairs of each micro-batch as one rank's part of a step, whose target tokens are all its own."""
    stores = []
    pairs = [pair for lengths in micro_batches for pair in sentences(lengths)]
    for number in (0, 1):
        rows = [pair[number] for pair in pairs]
        lengths = np.array([len(row) for row in rows], np.int64)
        tokens = np.array([token for row in rows for token in row], np.uint16)
        stores.append(SimpleNamespace(tokens=tokens, lengths=lengths, offsets=np.cumsum([0, *lengths])))
    corpus = ParallelCorpus(*stores, longest=0)
    rows, start = [], 0
    for one in micro_batches:
        rows.append(np.arange(start, start + len(one)))
        start += len(one)
    shape = shape or row_shape(micro_batches)
    num_tokens = sum(pair[1] for one in micro_batches for pair in one)
    return collate(corpus, rows, SPECIAL, shape, **{"num_target_tokens": num_tokens, **options})


def arguments(
    batch: PackedBatch, dtype: torch.dtype = torch.float32, attention: RowAttention = PLAIN_ATTENTION
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], tuple[RowSentences, RowSentences, RowSentences]]:
    """Return the arguments of `Transformer.rows`."""
    return (
        (batch.source, batch.source_positions),
        (batch.target_input, batch.target_positions),
        packed_sentences(batch, dtype, attention),
    )


def states(network: Transformer, batch: PackedBatch | PaddedBatch, attention: RowAttention = PLAIN_ATTENTION) -> Tensor:
    """Return the decoder states of a batch, in the dtype of the network."""
    if isinstance(batch, PaddedBatch):
        return PaddedTransformer(network)(batch.source, batch.target_input, batch.source_mask)
    return network.rows(*arguments(batch, network.embedding.weight.dtype, attention))


def losses_and_gradient(
    network: Transformer, batch: PackedBatch | PaddedBatch, attention: RowAttention = PLAIN_ATTENTION
) -> tuple[Tensor, Tensor]:
    """Return the sums of the loss [3] with label smoothing of 0.1, and its gradient by all parameters [N]."""
    operands = network.projection_operands(states(network, batch, attention))
    sums = label_smoothed_loss(*operands, batch.target_output, 0.1, PAD)
    gradients = torch.autograd.grad(sums.smoothed, list(network.parameters()))
    return torch.stack(sums).detach(), parameters_to_vector(gradients)


def upstream(result: Tensor) -> Tensor:
    """Return a gradient for a backward pass from a result."""
    return torch.sin(torch.arange(result.numel(), dtype=torch.float64)).view(result.shape).to(result)


Part = slice | Tensor
"""Rows, as a range or by their numbers."""


def attention_of_parts(
    heads: tuple[Tensor, Tensor, Tensor],
    parts: Iterable[tuple[Part, Part]],
    is_causal: bool,
    kept: Tensor | None = None,
) -> Tensor:
    """Compute the attention of one sentence at a time by the formula.

    Args:
        heads: queries, keys and values [rows, H, size].
        parts: the queries and the keys of each sentence.
        is_causal: a query attends to the keys up to its own.
        kept: factors on the weights [H, R, M], 0 where dropout drops one.

    Returns:
        [R, H * V]. Rows in no sentence, and those of sentences without keys, are zero.
    """
    query, key, value = heads
    result = query.new_zeros(*query.shape[:2], value.size(2))
    for own, other in parts:
        scores = torch.einsum("qhd,khd->hqk", query[own], key[other]) / query.size(2) ** 0.5
        if is_causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1) == 1, float("-inf"))
        weights = scores.softmax(-1)
        if kept is not None:
            weights = weights * kept[:, own][:, :, other]
        result[own] = torch.einsum("hqk,khv->qhv", weights, value[other])
    return result.flatten(1)


def sentence_by_sentence(query: Tensor, key: Tensor, value: Tensor, sentences: RowSentences, scale: float) -> Tensor:
    """Stand in for variable-length flash attention, which needs a GPU."""
    parts = []
    for offsets in (sentences.query_offsets.tolist(), sentences.key_offsets.tolist()):
        assert max(end - start for start, end in pairwise(offsets)) <= sentences.longest
        parts.append([slice(*ends) for ends in pairwise(offsets)])
    assert query.size(2) == value.size(2)
    query = query * (scale * query.size(2) ** 0.5)
    return attention_of_parts((query, key, value), zip(*parts, strict=True), sentences.is_causal)


def masked_attention(query: Tensor, key: Tensor, value: Tensor, sentences: RowSentences, scale: float) -> Tensor:
    """Stand in for variable-length flash attention, which needs a GPU, in a form that the compiler can trace."""
    own, other = (
        torch.searchsorted(offsets, torch.arange(rows.size(0), dtype=offsets.dtype), right=True)
        for offsets, rows in ((sentences.query_offsets, query), (sentences.key_offsets, key))
    )
    allowed = own[:, None] == other
    if sentences.is_causal:
        allowed &= torch.ones_like(allowed).tril()
    inputs = (x.transpose(0, 1) for x in (query, key, value))
    heads = F.scaled_dot_product_attention(*inputs, attn_mask=allowed, scale=scale)
    return heads.transpose(0, 1).flatten(1)
