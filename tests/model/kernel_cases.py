"""Inputs of the kernels and what they should compute, by plain loops over sentences in float64.

The plain and the compiled attention are compared with it.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from model.packed_attention import RowAttention, RowSentences
from tests.model.sentence_batches import attention_of_parts

UNUSED = 5
"""Number of padding tokens, after the last sentence."""
KINDS = ["self", "causal", "cross"]
TOLERANCES = {torch.float64: 1e-11, torch.float32: 5e-6, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Difference of a result that is allowed, as a share of its largest value."""


class Heads(NamedTuple):
    count: int
    d_k: int
    d_v: int


class Sentences(NamedTuple):
    """Numbers of tokens of each sentence on both sides, which are the same for self-attention."""

    queries: list[int]
    keys: list[int]


RAGGED = Sentences([1, 27, 3, 0, 40, 64, 5, 0], [1, 27, 3, 0, 40, 64, 5, 0])
CROSS = Sentences([1, 27, 0, 40, 5, 9, 0], [5, 30, 7, 0, 60, 1, 0])
"""Some of its sentences have no query, some no key, and one neither."""
EDGES = Sentences([16, 1, 15, 17, 200, 31, 33, 2, 64, 65], [32, 3, 200, 16, 31, 17, 1, 63, 33, 30])
"""Lengths beside the sizes of tiles."""


def inputs(heads: Heads, sentences: Sentences, kind: str, dtype: torch.dtype) -> list[Tensor]:
    """Return random arguments `inputs` of `flash_attention`, with NaN at padding."""
    torch.manual_seed(sum(heads) + sum(sentences.queries))
    count, d_k, d_v = heads
    sizes = [(sentences.queries, count * d_k), (sentences.keys, count * (d_k + d_v))]
    if kind != "cross":
        sizes = [(sentences.queries, count * (2 * d_k + d_v))]
    found = []
    for lengths, size in sizes:
        x = torch.randn(sum(lengths) + UNUSED, size)
        x[sum(lengths) :] = float("nan")
        found.append(x.to(dtype).requires_grad_())
    return found


def split(tensors: list[Tensor], heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values [rows, H, size]."""
    count, d_k, d_v = heads
    if len(tensors) == 1:
        parts = tensors[0].split([count * d_k, count * d_k, count * d_v], 1)
    else:
        parts = (tensors[0], *tensors[1].split([count * d_k, count * d_v], 1))
    query, key, value = (part.unflatten(1, (count, -1)) for part in parts)
    return query, key, value


def each(sentences: Sentences, kind: str) -> Iterator[tuple[slice, slice]]:
    """Return the rows of the queries and of the keys of each sentence."""
    first_query = first_key = 0
    for num_queries, num_keys in zip(*(sentences if kind == "cross" else (sentences.queries,) * 2), strict=True):
        yield slice(first_query, first_query + num_queries), slice(first_key, first_key + num_keys)
        first_query, first_key = first_query + num_queries, first_key + num_keys


def run_attention(
    attention: RowAttention, heads: Heads, sentences: Sentences, kind: str, tensors: list[Tensor]
) -> Tensor:
    """Run a kernel of a CPU."""
    assert attention.function is not None
    sides = sentences if kind == "cross" else (sentences.queries,) * 2
    queries, keys = (torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32) for lengths in sides)
    own = RowSentences(queries, keys, 0, kind == "causal")
    return attention.function(tensors, own, heads.count, heads.d_k, 0.0)


def check_attention(
    heads: Heads,
    sentences: Sentences,
    kind: str,
    dtype: torch.dtype,
    compute: Callable[[list[Tensor]], Tensor],
    kept: Tensor | None = None,
) -> None:
    """Compare results and gradients with the formula; tokens that have no key, and padding, are zero."""
    tensors = inputs(heads, sentences, kind, dtype)
    result = compute(tensors)
    upstream = torch.randn(result.shape).to(dtype)
    gradients = torch.autograd.grad(result, tensors, upstream)
    exact = [x.detach().double().nan_to_num().requires_grad_() for x in tensors]
    expected = attention_of_parts(split(exact, heads), each(sentences, kind), kind == "causal", kept)
    expected_gradients = torch.autograd.grad(expected, exact, upstream.double())
    assert result.dtype == dtype
    for found, wanted in zip((result, *gradients), (expected, *expected_gradients), strict=True):
        assert found.shape == wanted.shape
        assert not found[-UNUSED:].any()
        assert_near(found, wanted, TOLERANCES[dtype])


def assert_near(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    """Compare with a tolerance that is a share of the largest value."""
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=tolerance * float(wanted.detach().abs().max()))
