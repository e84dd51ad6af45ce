"""Plain attention against the attention of one sentence at a time, in float64, in uninitialized memory."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from data_module.batch import PackedBatch
from model.attention import attention
from model.packed_attention import (
    RowSentences,
    attend_in_groups,
    packed_sentences,
)
from tests.model.kernel_cases import KINDS, UNUSED, Heads, Sentences, check_attention, inputs
from tests.model.sentence_batches import Lengths, packed, row_shape, upstream

pytestmark = pytest.mark.usefixtures("uninitialized_memory_is_nan")

HEADS = Heads(3, 5, 7)
RAGGED: Lengths = [(66, 71), (70, 64), (33, 30), (30, 33), (29, 27), (9, 9), (1, 8), (8, 3), (1, 1)]
"""In descending order of the longer side; groups of two, three, three and one."""


def batch_of(lengths: Lengths, device: str = "cpu") -> PackedBatch:
    """Return the sentences with as much padding as `inputs_of` has."""
    sizes = [sum(pair[side] for pair in lengths) + UNUSED for side in (0, 1)]
    shape = row_shape([lengths])._replace(source_tokens=sizes[0], target_tokens=sizes[1])
    [batch] = packed([lengths], shape).to(device).micro_batches
    return batch


def rows_of(lengths: Lengths, kind: str, dtype: torch.dtype = torch.float64) -> RowSentences:
    return packed_sentences(batch_of(lengths), dtype)[KINDS.index(kind)]


def sentences_of(lengths: Lengths, kind: str) -> Sentences:
    sources, targets = ([pair[side] for pair in lengths] for side in (0, 1))
    return Sentences(sources if kind == "self" else targets, targets if kind == "causal" else sources)


def inputs_of(lengths: Lengths, kind: str, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return inputs(HEADS, sentences_of(lengths, kind), kind, dtype)


def plain(tensors: list[Tensor], rows: RowSentences, dropout: float = 0.0) -> Tensor:
    return attend_in_groups(partial(attention, dropout=dropout), tensors, rows, HEADS.count, HEADS.d_k)


@pytest.mark.parametrize("lengths", [RAGGED, [(300, 280)], [(9, 9)] * 20, [(40, 1), (1, 40)]], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_attention_of_one_sentence_at_a_time(lengths: Lengths, kind: str) -> None:
    rows = rows_of(lengths, kind)
    sentences = sentences_of(lengths, kind)
    check_attention(HEADS, sentences, kind, torch.float64, lambda tensors: plain(tensors, rows))


def kept_weights(lengths: Lengths, kind: str, probability: float, seed: int) -> Tensor:
    """Read off which weights are kept, [H, R, M]: keys of 0 weigh alike, and values are the rows of an identity."""
    rows = [len(x) for x in inputs_of(lengths, kind)]
    num_keys = rows[-1]
    query, key = (torch.zeros(count, HEADS.count * HEADS.d_k).double() for count in (rows[0], num_keys))
    value = torch.eye(num_keys).double().repeat(1, HEADS.count)
    given = [query, torch.cat([key, value], 1)] if kind == "cross" else [torch.cat([query, key, value], 1)]
    torch.manual_seed(seed)
    found = plain(given, rows_of(lengths, kind), probability).unflatten(1, (HEADS.count, num_keys))
    return (found.transpose(0, 1) != 0) / (1 - probability)


@pytest.mark.parametrize("kind", KINDS)
def test_dropout(kind: str) -> None:
    """The weights that are dropped follow from the seed. Both passes are those of plain attention with that mask."""
    rows = rows_of(RAGGED, kind)

    def dropped(tensors: list[Tensor]) -> Tensor:
        torch.manual_seed(5)
        result = plain(tensors, rows, 0.75)
        assert (plain(tensors, rows, 0.75) - result).abs().max() > 0.1
        return result

    kept = kept_weights(RAGGED, kind, 0.75, seed=5)
    check_attention(HEADS, sentences_of(RAGGED, kind), kind, torch.float64, dropped, kept)


@pytest.mark.parametrize(("kind", "dtype"), [("causal", torch.bfloat16), ("cross", torch.float16)])
@pytest.mark.parametrize("autocast", [False, True])
def test_16_bits_are_computed_in_float32_on_a_cpu(kind: str, dtype: torch.dtype, autocast: bool) -> None:
    """Whatever autocast's type is: the result is that of float32, rounded once."""
    tensors = inputs_of(RAGGED, kind, dtype)
    exact = [x.detach().float().requires_grad_() for x in tensors]
    other = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    with torch.autocast("cpu", other, enabled=autocast):
        result = plain(tensors, rows_of(RAGGED, kind, dtype))
    expected = plain(exact, rows_of(RAGGED, kind, torch.float32))
    assert torch.equal(result, expected.to(dtype))
    gradient = upstream(result)
    found = torch.autograd.grad(result, tensors, gradient)
    wanted = torch.autograd.grad(expected, exact, gradient.float())
    for one, other_one in zip(found, wanted, strict=True):
        assert torch.equal(one, other_one.to(dtype))


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
    width = HEADS.count * (2 * HEADS.d_k + HEADS.d_v)
    query = torch.randn(batch.source.numel(), width, requires_grad=True)
    with Largest() as noted:
        encoder, _, _ = packed_sentences(batch, torch.float32)
        plain([query], encoder).sum().backward()
    assert noted.largest <= 3 * max(1000**2, 800 * 30**2)


def test_no_offset_is_read_from_the_device() -> None:
    """A tensor on the device `meta` has no numbers: reading one raises."""
    for kind, rows in zip(KINDS, packed_sentences(batch_of(RAGGED, "meta"), torch.float32), strict=True):
        tensors = [torch.empty_like(x, device="meta", requires_grad=True) for x in inputs_of(RAGGED, kind)]
        result = plain(tensors, rows)
        result.sum().backward()
        assert result.shape == (len(tensors[0]), HEADS.count * HEADS.d_v)
