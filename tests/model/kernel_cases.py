"""Inputs of the kernels and what they should compute, by plain loops over sentences in float64.

Used for the compiled attention, in Triton's interpreter (`interpreted_kernels.py`) and on a GPU
(`tests/gpu/test_kernels.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.packed_attention import RowAttention, Segments
from tests.model.sentence_batches import attention_of_parts

_WEYL = 0x9E3779B9, 0xBB67AE85
"""What a round of Philox adds to the halves of the seed."""
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
    from model.fast.triton_attention import segment_attention

    own = segments(sentences, kind, tensors[0].device.type)
    return segment_attention(tensors, own, dropout, heads.count, heads.d_k, kind == "causal")


def run_attention(
    attention: RowAttention, heads: Heads, sentences: Sentences, kind: str, tensors: list[Tensor]
) -> Tensor:
    """Run a kernel of a CPU that reads no ids."""
    assert attention.function is not None
    *_, queries, keys = segments(sentences, kind, "cpu")
    own = Segments(queries, keys, 0, kind == "causal")
    return attention.function(tensors, own, heads.count, heads.d_k, 0.0)


def check_attention(
    heads: Heads,
    sentences: Sentences,
    kind: str,
    dtype: torch.dtype,
    device: str,
    kept: Tensor | None = None,
    state: Tensor | None = None,
    compute: Callable[[list[Tensor]], Tensor] | None = None,
) -> None:
    """Compare results and gradients with the formula; tokens that have no key, and padding, are zero.

    Those of Triton's kernel, unless another function of `inputs` is given.
    """
    tensors = inputs(heads, sentences, kind, dtype, device)
    result = compute(tensors) if compute else run(tensors, heads, sentences, kind, state)[0]
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
    """Return what `model.fast.triton_attention.dropout_state` draws, with these random numbers."""
    return torch.tensor([round(probability * 2**32), seed, offset], dtype=torch.int64, device=device)


def philox(seed: int, counters: Sequence[NDArray[np.uint64]]) -> list[NDArray[np.uint64]]:
    """Return four 32-bit numbers for each counter of four: Philox 4x32 with 7 rounds (Salmon et al. 2011)."""
    low, size = np.uint64(2**32 - 1), np.uint64(32)
    a, b, c, d = counters
    for number in range(7):
        keys = [
            np.uint64((half + number * step) % 2**32)
            for half, step in zip((seed % 2**32, seed >> 32), _WEYL, strict=True)
        ]
        left, right = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b, c, d = (right >> size) ^ b ^ keys[0], right & low, (left >> size) ^ d ^ keys[1], left & low
    return [a, b, c, d]


def kept_weights(probability: float, seed: int, offset: int, num_heads: int, rows: int, keys: int) -> Tensor:
    """Return which weights dropout keeps [H, R, M]: four neighbors at a distance of 8 have one counter."""
    query, key = np.arange(rows, dtype=np.uint64)[:, None], np.arange(keys, dtype=np.uint64)[None, :]
    eight, bits = np.uint64(8), np.uint64(3)
    which = (query >> bits) % np.uint64(2) * np.uint64(2) + (key >> bits) % np.uint64(2)
    kept = []
    for head in range(num_heads):
        first = (query & ~eight) * np.uint64(num_heads) + np.uint64(head)
        counters = np.broadcast_arrays(first, key & ~eight, np.uint64(offset), np.uint64(0))
        numbers = np.choose(which.astype(np.int64), philox(seed, counters))
        kept.append(torch.from_numpy(numbers >= round(probability * 2**32)))
    return torch.stack(kept)


def check_dropout(kind: str, dtype: torch.dtype, device: str) -> None:
    """Forward and backward pass keep the weights of the formula, also in sentences that are longer than a tile."""
    probability, heads, seed, offset = 0.3, Heads(2, 16, 16), 2**40 + 123, 7
    sentences = Sentences([20, 70, 0, 33, 1], [9, 75, 3, 20, 5])
    rows = max(map(sum, sentences)) + UNUSED
    kept = kept_weights(probability, seed, offset, heads.count, rows, rows)
    state = dropout_state(probability, seed, offset, device)
    check_attention(heads, sentences, kind, dtype, device, kept / (1 - probability), state)
    if kind == "causal":
        check_attention(heads, sentences, kind, dtype, device, None, dropout_state(0.0, seed, offset, device))


def check_logits_that_are_not_finite(device: str) -> None:
    """The loss is then not finite either, so that the step is skipped: PyTorch's softmax has the same results.

    What is in the padding of a row is not read as logits, and becomes zero.
    """
    from model.fast.triton_loss import read_logits

    for value in (float("nan"), float("inf")):
        for column in (0, 4095, 4096, 9000):
            padded = torch.full((2, 9024), value, device=device)
            logits = padded[:, :9001]
            logits[:] = torch.randn(2, 9001)
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
            assert not padded[0, 9001:].any()
