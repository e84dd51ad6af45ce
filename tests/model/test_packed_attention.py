"""Attention in blocks against the attention of one sentence at a time, in float64, in uninitialized memory."""

import random
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import opcheck

import model.packed_attention
from data_module.batching.batch import NO_SENTENCE
from model.packed_attention import (
    KEPT_WIDTH,
    PYTORCH_ATTENTION,
    Attention,
    block_attention,
    block_attention_backward,
    block_bias,
    dropout_state,
    flash_attention,
    packed_segments,
)
from tests.model.sentence_batches import attention_of_parts, packed, row_shape

pytestmark = pytest.mark.usefixtures("uninitialized_memory_is_nan")

HEADS, D_K, D_V = 3, 5, 7
UNUSED = 4
"""Rows after the last block."""
LAYOUTS = {
    "one width": [(3, 64)],
    "two widths": [(5, 64), (2, 128)],
    "kept and not": [(1, 64), (2, 128), (1, 512)],
    "not kept": [(3, 512)],
    "single": [(1, 64)],
}
assert 128 <= KEPT_WIDTH < 512


class Rows(NamedTuple):
    """The sentence of each row in blocks."""

    blocks: list[tuple[int, int]]
    query: Tensor
    key: Tensor

    def biases(self, is_causal: bool, dtype: torch.dtype = torch.float64) -> list[Tensor]:
        biases, row = [], 0
        for count, width in self.blocks:
            one = slice(row, row + count * width)
            sides = (side[one].view(count, width) for side in (self.query, self.key))
            biases.append(block_bias(*sides, is_causal, dtype))
            row = one.stop
        return biases


def make_rows(blocks: list[tuple[int, int]], same_keys: bool) -> Rows:
    """Fill blocks with sentences. The first block has no padding, and the last of several has no sentence."""
    draws, sides, sentence = random.Random(3), ([], []), 0
    widths = [width for count, width in blocks for _ in range(count)]
    for number, width in enumerate(widths):
        empty = number == len(widths) - 1 > 0
        num_sentences = 0 if empty else draws.randint(1, 5)
        own = []
        for _ in sides:
            ends = sorted(draws.sample(range(1, width - 1), num_sentences))
            if number == 0:
                ends[-1] = width
            lengths = [end - start for start, end in zip([0, *ends], ends, strict=False)]
            rows = [sentence + i for i, length in enumerate(lengths) for _ in range(length)]
            own.append(rows + [NO_SENTENCE] * (width - len(rows)))
        if same_keys:
            own[1] = own[0]
        for side, rows in zip(sides, own, strict=True):
            side.extend(rows)
        sentence += num_sentences
    query, key = map(torch.tensor, sides)
    assert (query == NO_SENTENCE).any() == (len(widths) > 1)
    return Rows(blocks, query, key)


def by_sentence(
    query: Tensor, key_value: Tensor | None, rows: Rows, is_causal: bool, kept: Tensor | None = None
) -> Tensor:
    """Compute the attention of one sentence at a time, with factors `kept` on the weights."""
    size = HEADS * D_K
    if key_value is None:
        query, key_value = query[:, :size], query[:, size:]
    heads = [x.unflatten(1, (HEADS, -1)) for x in (query, key_value[:, :size], key_value[:, size:])]
    sentences = range(int(rows.query.max()) + 1)
    parts = [[torch.nonzero(side == number).squeeze(1) for side in (rows.query, rows.key)] for number in sentences]
    return attention_of_parts((heads[0], heads[1], heads[2]), [(own, other) for own, other in parts], is_causal, kept)


def inputs(rows: Rows, kind: str, dtype: torch.dtype = torch.float64, num_heads: int = HEADS) -> list[Tensor]:
    torch.manual_seed(1)
    widths = [num_heads * (2 * D_K + D_V)] if kind != "cross" else [num_heads * D_K, num_heads * (D_K + D_V)]
    return [torch.randn(len(rows.query) + UNUSED, width, dtype=dtype, requires_grad=True) for width in widths]


def live(rows: Rows) -> Tensor:
    """Return [R, 1], 1 at tokens of sentences and 0 at padding and at tokens in no block."""
    return F.pad((rows.query != NO_SENTENCE).double(), (0, UNUSED)).unsqueeze(1)


@pytest.mark.parametrize("blocks", LAYOUTS.values(), ids=list(LAYOUTS))
@pytest.mark.parametrize("kind", ["self", "causal", "cross"])
@pytest.mark.parametrize("chunk_blocks", [None, 1, 2])
def test_equals_attention_of_one_sentence_at_a_time(
    blocks: list[tuple[int, int]], kind: str, chunk_blocks: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gradients; all blocks of a width at once, and in chunks of one or two of the narrowest blocks."""
    if chunk_blocks is not None:
        scores = chunk_blocks * HEADS * blocks[0][1] ** 2
        monkeypatch.setattr(model.packed_attention, "_CHUNK_SCORES", scores // torch.get_num_threads())
    rows = make_rows(blocks, same_keys=kind != "cross")
    tensors = inputs(rows, kind)
    query, key_value = tensors if kind == "cross" else (tensors[0], None)
    result, weights = block_attention(query, key_value, rows.biases(kind == "causal"), None, HEADS, D_K)
    expected = by_sentence(query, key_value, rows, kind == "causal")
    torch.testing.assert_close(result * live(rows), expected, rtol=0, atol=1e-10)
    assert result.isfinite().all()  # also at padding
    assert not result[-UNUSED:].any()
    assert weights.isfinite().all()
    assert weights.numel() == HEADS * sum(count * width**2 for count, width in blocks if width <= KEPT_WIDTH)
    factors = torch.randn_like(result) * live(rows)
    ours, theirs = (torch.autograd.grad((x * factors).sum(), tensors) for x in (result, expected))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    assert all(gradient[:64].any() for gradient in ours)


def kept_weights(rows: Rows, probability: float, state: Tensor) -> Tensor:
    """Read off which weights are kept, [H, R, R]: keys of 0 weigh alike, and values are columns of an identity."""
    size, kept = len(rows.query), torch.zeros(HEADS, len(rows.query), len(rows.query), dtype=torch.float64)
    counts = (rows.query[:, None] == rows.key[None, :]).sum(1, keepdim=True)
    for first in range(0, size, D_V):
        values = torch.zeros(size, D_V, dtype=torch.float64)
        columns = min(D_V, size - first)
        values[first : first + columns, :columns] = torch.eye(columns)
        key_value = torch.cat([torch.zeros(size, HEADS * D_K), values.repeat(1, HEADS)], 1).double()
        query = torch.zeros(size, HEADS * D_K, dtype=torch.float64)
        found = block_attention(query, key_value, rows.biases(False), state, HEADS, D_K)[0].unflatten(1, (HEADS, D_V))
        kept[:, :, first : first + columns] = (found[:, :, :columns] * counts[:, None]).transpose(0, 1)
    of_sentences = (rows.query[:, None] == rows.key[None, :]) & (rows.query[:, None] != NO_SENTENCE)
    kept *= of_sentences
    one = 32768 / (32768 - round(probability * 32768))
    assert kept[kept != 0].sub(one).abs().max() < 1e-9
    share = float((kept != 0).sum() / of_sentences.sum() / HEADS)
    assert abs(share - 1 + probability) < 0.02
    return kept


@pytest.mark.parametrize("kind", ["self", "causal", "cross"])
@pytest.mark.parametrize("chunk_blocks", [None, 1])
def test_dropout(kind: str, chunk_blocks: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights that are dropped are those of plain attention with that mask, in both passes, whatever the chunks."""
    rows, state = make_rows(LAYOUTS["kept and not"], same_keys=kind != "cross"), torch.tensor([3 << 30, 5, 2**31 - 1])
    kept = kept_weights(rows, 0.75, state)
    if chunk_blocks is not None:
        monkeypatch.setattr(model.packed_attention, "_CHUNK_SCORES", HEADS * 64**2 // torch.get_num_threads())
    tensors = inputs(rows, kind)
    query, key_value = tensors if kind == "cross" else (tensors[0], None)
    result, _ = block_attention(query, key_value, rows.biases(kind == "causal"), state, HEADS, D_K)
    expected = by_sentence(query, key_value, rows, kind == "causal", kept=kept)
    torch.testing.assert_close(result * live(rows), expected, rtol=0, atol=1e-10)
    factors = torch.randn_like(result) * live(rows)
    ours, theirs = (torch.autograd.grad((x * factors).sum(), tensors) for x in (result, expected))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def test_dropout_masks_are_independent() -> None:
    """Those of blocks, heads, queries, neighbouring keys and draws differ as two coins do."""
    probability, width, generator = 0.3, 64, torch.random.fork_rng()
    sentences = torch.arange(2).repeat_interleave(width)  # one in each block
    rows = Rows([(2, width)], sentences, sentences)
    with generator:
        torch.manual_seed(3)
        masks = [
            kept_weights(rows, probability, dropout_state(probability, torch.device("cpu")))[:, :width, :width] != 0
            for _ in range(2)
        ]
        torch.manual_seed(3)
        again = kept_weights(rows, probability, dropout_state(probability, torch.device("cpu")))
    assert torch.equal(again[:, :width, :width] != 0, masks[0])
    second_block = again[:, width:, width:] != 0
    pairs = {
        "draws": (masks[0], masks[1]),
        "blocks": (masks[0], second_block),
        "heads": (masks[0], masks[0].roll(1, 0)),
        "queries": (masks[0], masks[0].roll(1, 1)),
        "keys": (masks[0], masks[0].roll(1, 2)),
        "four keys": (masks[0], masks[0].roll(4, 2)),
    }
    for name, (one, other) in pairs.items():
        # 12,288 pairs: a standard deviation of 0.0045.
        differ = float((one != other).double().mean())
        assert abs(differ - 2 * probability * (1 - probability)) < 0.02, name


@pytest.mark.parametrize(("kind", "dtype"), [("causal", torch.bfloat16), ("cross", torch.float16)])
@pytest.mark.parametrize("autocast", [False, True])
def test_16_bits_stay_near_float64(kind: str, dtype: torch.dtype, autocast: bool) -> None:
    """Autocast to another type changes nothing, since the operator has the type of its input."""
    rows = make_rows([(3, 64), (1, 512)], same_keys=kind != "cross")
    tensors = [x.detach().to(dtype).requires_grad_() for x in inputs(rows, kind)]
    exact = [x.detach().double().requires_grad_() for x in tensors]
    other = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    query, key_value = tensors if kind == "cross" else (tensors[0], None)
    with torch.autocast("cpu", other, enabled=autocast):
        result, _ = block_attention(query, key_value, rows.biases(kind == "causal", dtype), None, HEADS, D_K)
        loss = (result.double() * live(rows)).square().sum()
    found = torch.autograd.grad(loss, tensors)
    expected = by_sentence(*(exact if kind == "cross" else (exact[0], None)), rows, kind == "causal")
    expected_gradients = torch.autograd.grad(expected.square().sum(), exact)
    assert result.dtype == dtype
    for one, other_one in zip((result * live(rows), *found), (expected, *expected_gradients), strict=True):
        assert (one.double() - other_one).norm() < 0.02 * other_one.norm()


@pytest.mark.parametrize("kind", ["self", "cross"])
@pytest.mark.parametrize("blocks", [LAYOUTS["two widths"], LAYOUTS["kept and not"]], ids=["kept", "kept and not"])
def test_the_operators_are_what_they_tell_the_compiler(kind: str, blocks: list[tuple[int, int]]) -> None:
    """Schema, shapes, autograd and tracing, by PyTorch's own check."""
    rows = make_rows(blocks, same_keys=kind != "cross")
    tensors = inputs(rows, kind, num_heads=1)
    query, key_value = tensors if kind == "cross" else (tensors[0], None)
    biases = rows.biases(False)
    for state in (None, dropout_state(0.3, torch.device("cpu"))):
        opcheck(block_attention, (query, key_value, biases, state, 1, D_K))
        with torch.no_grad():
            result, weights = block_attention(query, key_value, biases, state, 1, D_K)
            opcheck(
                block_attention_backward, (torch.ones_like(result), weights, query, key_value, biases, state, 1, D_K)
            )


def test_segments_of_the_three_attentions() -> None:
    """The encoder reads the source, the decoder the target up to each token, and from there the source."""
    [batch] = packed([[(3, 4), (5, 2)]]).micro_batches
    encoder, decoder, cross = (one.biases[0] == 0 for one in packed_segments(batch, torch.float32))
    assert encoder.shape == (64, 64)
    source, target = batch.source_segments.tolist(), batch.target_segments.tolist()
    assert (source.count(0), target.count(0), source.count(1), target.count(1)) == (3, 4, 5, 2)
    for row in range(64):
        for column in range(64):
            dead = target[row] == NO_SENTENCE
            assert encoder[row, column] == (source[row] == source[column] or source[row] == NO_SENTENCE)
            assert decoder[row, column] == (dead or (target[row] == target[column] and column <= row))
            assert cross[row, column] == (dead or target[row] == source[column])
    [batch] = packed([[(3, 4), (5, 2)]], in_blocks=False).micro_batches
    kinds = packed_segments(batch, torch.float32)
    assert [(one.is_causal, one.biases, one.longest) for one in kinds] == [
        (False, [], 5),
        (True, [], 5),
        (False, [], 5),
    ]
    starts = [[0, 3, 8], [0, 4, 6]]
    for one, query, key in zip(kinds, (0, 1, 1), (0, 1, 0), strict=True):
        assert one.query_offsets[:3].tolist() == starts[query]
        assert one.key_offsets[:3].tolist() == starts[key]


def test_segments_for_the_kernels_by_hand() -> None:
    """Sentences of 3 and 5 tokens, their translations of 4 and 2, a segment of 3 dead tokens, and two of none."""
    shape = row_shape([[(3, 4), (5, 2)]], in_blocks=False)._replace(source_tokens=11, target_tokens=9, segments=5)
    [batch] = packed([[(3, 4), (5, 2)]], in_blocks=False, shape=shape).micro_batches
    source = [0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2], [0, 3, 8, 11, 11, 11]
    target = [0, 0, 0, 0, 1, 1, 2, 2, 2], [0, 4, 6, 9, 9, 9]
    own = Attention("own", flash_attention, reads_ids=True)
    kinds = packed_segments(batch, torch.float32, own)
    for one, query, key in zip(kinds, (source, target, target), (source, target, source), strict=True):
        given = one.query_ids, one.key_ids, one.query_offsets, one.key_offsets
        assert [list(map(int, each)) for each in given] == [query[0], key[0], query[1], key[1]]
        assert {each.dtype for each in given} == {torch.int32}
        assert not one.biases
    for attention, layout in ((PYTORCH_ATTENTION, {"in_blocks": False}), (own, {})):
        [batch] = packed([[(3, 4)]], **layout).micro_batches
        assert all(one.query_ids is None for one in packed_segments(batch, torch.float32, attention))
