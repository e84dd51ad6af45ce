"""Plain attention against the attention of one sentence at a time, in float64, in uninitialized memory."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from model.attention import attention
from model.packed_attention import (
    FLASH_ATTENTION,
    PLAIN_ATTENTION,
    RowAttention,
    Segments,
    attend_in_groups,
    flash_attention,
    packed_segments,
    split_inputs,
)
from tests.model.sentence_batches import Lengths, attention_of_parts, packed, row_shape

pytestmark = pytest.mark.usefixtures("uninitialized_memory_is_nan")

HEADS, D_K, D_V = 3, 5, 7
KINDS = ("self", "causal", "cross")
RAGGED: Lengths = [(66, 71), (70, 64), (33, 30), (30, 33), (29, 27), (9, 9), (1, 8), (8, 3), (1, 1)]
"""In descending order of the longer side; groups of two, three, three and one."""


def segments_of(lengths: Lengths, kind: str, dtype: torch.dtype = torch.float64) -> Segments:
    [batch] = packed([lengths]).micro_batches
    return packed_segments(batch, dtype)[KINDS.index(kind)]


def inputs_of(lengths: Lengths, kind: str, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return random queries, keys and values, with NaN at padding."""
    generator = torch.Generator().manual_seed(1)
    shape = row_shape([lengths])
    rows = (shape.source_tokens, HEADS * (2 * D_K + D_V)), (shape.target_tokens, HEADS * (2 * D_K + D_V))
    sizes = {"self": rows[:1], "causal": rows[1:]}.get(
        kind, [(shape.target_tokens, HEADS * D_K), (shape.source_tokens, HEADS * (D_K + D_V))]
    )
    sides = {"self": (0,), "causal": (1,)}.get(kind, (1, 0))
    found = []
    for side, size in zip(sides, sizes, strict=True):
        x = torch.randn(size, dtype=torch.float64, generator=generator)
        x[sum(pair[side] for pair in lengths) :] = float("nan")
        found.append(x.to(dtype).requires_grad_())
    return found


def by_sentence(inputs: list[Tensor], lengths: Lengths, kind: str, kept: Tensor | None = None) -> Tensor:
    """Compute the attention of one sentence at a time, with factors `kept` on the weights."""
    sides = {"self": (0, 0), "causal": (1, 1)}.get(kind, (1, 0))
    parts, firsts = [], [0, 0]
    for pair in lengths:
        own = [slice(first, first + pair[side]) for first, side in zip(firsts, sides, strict=True)]
        firsts = [part.stop for part in own]
        parts.append((own[0], own[1]))
    query, key, value = (x.unflatten(1, (HEADS, -1)) for x in split_inputs(inputs, HEADS * D_K))
    return attention_of_parts((query, key, value), parts, kind == "causal", kept)


def plain(inputs: list[Tensor], segments: Segments, dropout: float = 0.0) -> Tensor:
    return attend_in_groups(partial(attention, dropout=dropout), inputs, segments, HEADS, D_K)


def upstream(result: Tensor) -> Tensor:
    return torch.sin(torch.arange(result.numel(), dtype=torch.float64)).view(result.shape).to(result)


@pytest.mark.parametrize("lengths", [RAGGED, [(300, 280)], [(9, 9)] * 20, [(40, 1), (1, 40)]], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_attention_of_one_sentence_at_a_time(lengths: Lengths, kind: str) -> None:
    """With gradients; what is at padding changes nothing, and has no gradient."""
    tensors = inputs_of(lengths, kind)
    exact = [x.detach().nan_to_num().requires_grad_() for x in tensors]
    result, expected = plain(tensors, segments_of(lengths, kind)), by_sentence(exact, lengths, kind)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-10)
    ours, theirs = (torch.autograd.grad(x, leaves, upstream(x)) for x, leaves in ((result, tensors), (expected, exact)))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def kept_weights(lengths: Lengths, kind: str, probability: float, seed: int) -> Tensor:
    """Read off which weights are kept, [H, R, M]: keys of 0 weigh alike, and values are columns of an identity."""
    segments, rows = segments_of(lengths, kind), [len(x) for x in inputs_of(lengths, kind)]
    num_queries, num_keys = rows[0], rows[-1]
    kept = torch.zeros(HEADS, num_queries, num_keys, dtype=torch.float64)
    for first in range(0, num_keys, D_V):
        values = torch.zeros(num_keys, HEADS, D_V, dtype=torch.float64)
        columns = min(D_V, num_keys - first)
        values[first : first + columns, :, :columns] = torch.eye(columns).unsqueeze(1)
        projections = [torch.zeros(num_queries, HEADS * D_K), torch.zeros(num_keys, HEADS * D_K), values.flatten(1)]
        if kind == "cross":
            inputs = [projections[0].double(), torch.cat(projections[1:], 1)]
        else:
            inputs = [torch.cat(projections, 1)]
        torch.manual_seed(seed)
        found = plain(inputs, segments, probability).unflatten(1, (HEADS, D_V))
        kept[:, :, first : first + columns] = found[:, :, :columns].transpose(0, 1)
    return (kept != 0) / (1 - probability)


@pytest.mark.parametrize("kind", KINDS)
def test_dropout(kind: str) -> None:
    """The weights that are dropped follow from the seed. Both passes are those of plain attention with that mask."""
    kept = kept_weights(RAGGED, kind, 0.75, seed=5)
    tensors, segments = inputs_of(RAGGED, kind), segments_of(RAGGED, kind)
    exact = [x.detach().nan_to_num().requires_grad_() for x in tensors]
    torch.manual_seed(5)
    result = plain(tensors, segments, 0.75)
    other = plain(tensors, segments, 0.75)
    expected = by_sentence(exact, RAGGED, kind, kept)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-10)
    assert (other - expected).abs().max() > 0.1
    ours, theirs = (torch.autograd.grad(x, leaves, upstream(x)) for x, leaves in ((result, tensors), (expected, exact)))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("kind", "dtype"), [("causal", torch.bfloat16), ("cross", torch.float16)])
@pytest.mark.parametrize("autocast", [False, True])
def test_16_bits_are_computed_in_float32_on_a_cpu(kind: str, dtype: torch.dtype, autocast: bool) -> None:
    """Whatever autocast's type is: the result is that of float32, rounded once."""
    tensors, exact = inputs_of(RAGGED, kind, dtype), inputs_of(RAGGED, kind, torch.float32)
    exact = [x.detach().float().requires_grad_() for x in tensors]
    other = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    with torch.autocast("cpu", other, enabled=autocast):
        result = plain(tensors, segments_of(RAGGED, kind, dtype))
    expected = plain(exact, segments_of(RAGGED, kind, torch.float32))
    assert torch.equal(result, expected.to(dtype))
    gradient = upstream(result)
    found = torch.autograd.grad(result, tensors, gradient)
    wanted = torch.autograd.grad(expected, exact, gradient.float())
    for one, other_one in zip(found, wanted, strict=True):
        assert torch.equal(one, other_one.to(dtype))


def test_autocast_is_as_before_also_where_attention_calls_attention() -> None:
    tensors, segments = inputs_of(RAGGED, "self", torch.float32), segments_of(RAGGED, "self", torch.float32)

    def attend(*given: Tensor) -> Tensor:
        plain(tensors, segments)
        assert not torch.is_autocast_enabled("cpu")
        return attention(*given)

    with torch.autocast("cpu", torch.bfloat16):
        attend_in_groups(attend, tensors, segments, HEADS, D_K)
        assert torch.is_autocast_enabled("cpu")


class Largest(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that an operator makes."""

    largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        tensors = result if isinstance(result, (tuple, list)) else [result]
        self.largest = max(self.largest, *(x.untyped_storage().nbytes() // x.itemsize for x in tensors))
        return result


def test_memory_grows_with_the_longest_group() -> None:
    """25,000 tokens, 1,000 of them of one sentence. Padded to one rectangle, there would be 800 squares of 1,000."""
    lengths: Lengths = [(1000, 1000)] + [(30, 30)] * 800
    [batch] = packed([lengths]).micro_batches
    query = torch.randn(batch.source.numel(), HEADS * (2 * D_K + D_V), requires_grad=True)
    with Largest() as noted:
        encoder, _, _ = packed_segments(batch, torch.float32)
        plain([query], encoder).sum().backward()
    assert noted.largest <= 3 * max(1000**2, 800 * 30**2)


def test_no_offset_is_read_from_the_device() -> None:
    """A tensor on the device `meta` has no numbers: reading one raises."""
    [batch] = packed([RAGGED]).to("meta").micro_batches
    for kind, segments in zip(KINDS, packed_segments(batch, torch.float32), strict=True):
        tensors = [torch.empty_like(x, device="meta", requires_grad=True) for x in inputs_of(RAGGED, kind)]
        result = plain(tensors, segments)
        result.sum().backward()
        assert result.shape == (len(tensors[0]), HEADS * D_V)


def test_padded_groups_by_hand() -> None:
    """One group: sentences of 5 and 3 tokens, whose translations have 2 and 4."""
    shape = row_shape([[(5, 2), (3, 4)]])._replace(source_tokens=10, target_tokens=7)
    [batch] = packed([[(5, 2), (3, 4)]], shape).micro_batches
    encoder, decoder, cross = (one.padded for one in packed_segments(batch, torch.float32, PLAIN_ATTENTION))
    assert encoder.queries.tokens.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 7, 7, 0]
    assert encoder.queries.is_filler[:, 0].tolist() == [False] * 8 + [True] * 3
    assert encoder.queries.cells.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 10, 10]
    assert decoder.queries.tokens.tolist() == [0, 1, 1, 1, 2, 3, 4, 5, 0]
    assert decoder.queries.cells.tolist() == [0, 1, 4, 5, 6, 7, 8]
    assert [side is other for side, other in ((cross.queries, decoder.keys), (cross.keys, encoder.queries))] == [
        True
    ] * 2
    [group] = encoder.groups
    hidden = float("-inf")
    assert group[:3] == (2, 5, 5)
    assert group.bias.tolist() == [[[[0] * 5]], [[[0, 0, 0, hidden, hidden]]]]
    [group] = cross.groups
    assert group[:3] == (2, 4, 5)
    assert group.bias is encoder.groups[0].bias
    [group] = decoder.groups
    assert group[:3] == (2, 4, 4)
    assert group.bias.shape == (1, 1, 4, 4)
    assert (group.bias[0, 0] == 0).tolist() == torch.ones(4, 4).tril().bool().tolist()


def test_segments_for_the_kernels_by_hand() -> None:
    """Sentences of 5 and 3 tokens, their translations of 2 and 4, a segment of 3 dead tokens, and two of none.

    The encoder reads the source, the decoder the target up to each token, and from there the source.
    """
    shape = row_shape([[(5, 2), (3, 4)]])._replace(source_tokens=11, target_tokens=9, segments=5)
    [batch] = packed([[(5, 2), (3, 4)]], shape).micro_batches
    source = [0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2], [0, 5, 8, 11, 11, 11]
    target = [0, 0, 1, 1, 1, 1, 2, 2, 2], [0, 2, 6, 9, 9, 9]
    own = RowAttention("own", flash_attention, reads_ids=True)
    kinds = packed_segments(batch, torch.float32, own)
    for one, query, key in zip(kinds, (source, target, target), (source, target, source), strict=True):
        given = one.query_ids, one.key_ids, one.query_offsets, one.key_offsets
        assert [list(map(int, each)) for each in given] == [query[0], key[0], query[1], key[1]]
        assert {each.dtype for each in given} == {torch.int32}
        assert (one.padded, one.longest, one.kernel) == (None, 5, flash_attention)
    assert [one.is_causal for one in kinds] == [False, True, False]
    for attention_of_all in (PLAIN_ATTENTION, FLASH_ATTENTION):
        assert all(one.query_ids is None for one in packed_segments(batch, torch.float32, attention_of_all))


def test_biases_of_version_1_0_are_refused() -> None:
    with pytest.raises(ValueError, match=r"reads `segments\.biases`.*override `attend` alone"):
        _ = segments_of(RAGGED, "self").biases
