"""Inputs of the Triton kernels and what they should compute, by plain loops over sentences in float64.

Used in Triton's interpreter (`interpreted_kernels.py`) and on a GPU (`tests/gpu/test_kernels.py`).
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from model.fast.triton_attention import segment_attention
from model.fast.triton_loss import read_logits
from tests.model.sentence_batches import attention_of_parts

UNUSED = 5
"""Number of padding tokens, after the last sentence."""
KINDS = ["self", "causal", "cross"]
TOLERANCES = {torch.float32: 5e-6, torch.float16: 5e-3, torch.bfloat16: 3e-2}
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


def inputs(heads: Heads, sentences: Sentences, kind: str, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Return random arguments `inputs` of `segment_attention`, with NaN at padding."""
    torch.manual_seed(sum(heads) + sum(sentences.queries))
    count, d_k, d_v = heads
    sizes = [(sentences.queries, count * d_k), (sentences.keys, count * (d_k + d_v))]
    if kind != "cross":
        sizes = [(sentences.queries, count * (2 * d_k + d_v))]
    found = []
    for lengths, size in sizes:
        x = torch.randn(sum(lengths) + UNUSED, size)
        x[sum(lengths) :] = float("nan")
        found.append(x.to(device, dtype).requires_grad_())
    return found


def segments(sentences: Sentences, kind: str, device: str) -> list[Tensor]:
    """Return the argument `segments`; the ids of padding are below 0 and at or past the number of sentences."""
    sides = sentences.queries, sentences.queries if kind != "cross" else sentences.keys
    ids, offsets = [], []
    for lengths in sides:
        rows = [number for number, length in enumerate(lengths) for _ in range(length)]
        padding = [-1, len(lengths), len(lengths) + 1, 10**9, -(10**9)]
        ids.append(torch.tensor(rows + padding, dtype=torch.int32, device=device))
        offsets.append(torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32))
    assert len(padding) == UNUSED
    return [*ids, *offsets]


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


def run(
    tensors: list[Tensor], heads: Heads, sentences: Sentences, kind: str, dropout: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run the kernel."""
    own = segments(sentences, kind, tensors[0].device.type)
    return segment_attention(tensors, own, dropout, heads.count, heads.d_k, kind == "causal")


def check_attention(
    heads: Heads, sentences: Sentences, kind: str, dtype: torch.dtype, device: str, kept: Any = None, state: Any = None
) -> None:
    """Compare results and gradients; tokens that have no key, and padding, are zero."""
    tensors = inputs(heads, sentences, kind, dtype, device)
    result, _ = run(tensors, heads, sentences, kind, state)
    upstream = torch.randn(result.shape, device=device).to(dtype)
    gradients = torch.autograd.grad(result, tensors, upstream)
    exact = [x.detach().cpu().double().nan_to_num().requires_grad_() for x in tensors]
    expected = attention_of_parts(split(exact, heads), each(sentences, kind), kind == "causal", kept)
    expected_gradients = torch.autograd.grad(expected, exact, upstream.cpu().double())
    assert result.dtype == dtype
    for found, wanted in zip((result, *gradients), (expected, *expected_gradients), strict=True):
        assert found.shape == wanted.shape
        assert not found[-UNUSED:].any()
        assert_near(found, wanted, TOLERANCES[dtype])


def assert_near(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    """Compare with a tolerance that is a share of the largest value."""
    torch.testing.assert_close(
        found.cpu().double(), wanted.cpu(), rtol=0, atol=tolerance * float(wanted.detach().abs().max())
    )


def dropout_state(probability: float, seed: int, offset: int, device: str) -> Tensor:
    """Return what `model.packed_attention.dropout_state` draws, with these random numbers."""
    return torch.tensor([round(probability * 2**32), seed, offset], dtype=torch.int64, device=device)


def check_dropout(kind: str, device: str) -> None:
    """Read off which weights are kept, by values that are rows of an identity, and compare with that mask."""
    probability, heads, seed = 0.3, Heads(2, 16, 32), 2**40 + 123
    sentences = Sentences([20, 7, 0, 32, 1], [9, 32, 3, 20, 5])
    lengths = sentences.keys if kind == "cross" else sentences.queries
    tensors = inputs(heads, sentences, kind, torch.float32, device)
    eye = torch.cat([torch.eye(heads.d_v)[:length] for length in lengths]).repeat(1, heads.count)
    with torch.no_grad():
        tensors[-1][:-UNUSED, -heads.count * heads.d_v :] = eye
    plain, _ = run(tensors, heads, sentences, kind)

    def kept(state: Tensor) -> Tensor:
        dropped, _ = run(tensors, heads, sentences, kind, state)
        return _factors(plain, dropped, heads, sentences, kind) * (1 - probability)

    state = dropout_state(probability, seed, offset=7, device=device)
    mask, count = kept(state), _num_weights(heads, sentences, kind)
    torch.testing.assert_close(mask, (mask > 0.5).double(), rtol=0, atol=1e-4)
    assert abs(float(mask.sum()) / count - (1 - probability)) < 0.04
    check_attention(heads, sentences, kind, torch.float32, device, (mask > 0.5) / (1 - probability), state)
    for other in ((seed, 8), (seed + 1, 7)):
        changed = ((kept(dropout_state(probability, *other, device=device)) > 0.5) != (mask > 0.5)).sum()
        # Two independent masks differ in 2 p (1 - p) of the weights.
        assert abs(float(changed) / count - 2 * probability * (1 - probability)) < 0.05
    assert torch.equal(run(tensors, heads, sentences, kind, dropout_state(0.0, 1, 2, device))[0], plain)


def _num_weights(heads: Heads, sentences: Sentences, kind: str) -> int:
    total = 0
    for own, other in each(sentences, kind):
        queries, keys = own.stop - own.start, other.stop - other.start
        total += queries * (queries + 1) // 2 if kind == "causal" else queries * keys
    return total * heads.count


def _factors(plain: Tensor, dropped: Tensor, heads: Heads, sentences: Sentences, kind: str) -> Tensor:
    """Return the factors on the weights [H, R, M]: results are weights, since values are rows of an identity."""
    ratios = (
        (dropped.detach().cpu().double() / plain.detach().cpu().double()).nan_to_num().unflatten(1, (heads.count, -1))
    )
    factors = ratios.new_zeros(heads.count, plain.size(0), max(map(sum, sentences)) + UNUSED)
    for own, other in each(sentences, kind):
        factors[:, own, other] = ratios[own, :, : other.stop - other.start].transpose(0, 1)
    return factors


def check_logits_that_are_not_finite(device: str) -> None:
    """The loss is then not finite either, so that the step is skipped: PyTorch's softmax has the same results."""
    for value in (float("nan"), float("inf")):
        for column in (0, 8191, 8192, 9000):
            logits = torch.randn(2, 9001, device=device)
            logits[1, column] = value
            targets = torch.tensor([[3], [5]], device=device)
            expected = logits.cpu().softmax(1)
            largest, _, max_probability, gradient = read_logits(logits, targets, torch.float32, 0.1, True)
            loss = largest - max_probability.log()
            assert loss[0].isfinite()
            assert not loss[1].isfinite()
            assert gradient is not None
            assert gradient[0].isfinite().all()
            assert gradient[1].isnan().any() == expected[1].isnan().any()
