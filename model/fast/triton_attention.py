"""Triton kernels for attention over sentences that lie end to end.

A program computes a tile of consecutive query rows for one head, whatever sentences they belong to, and loops over the
keys from the first key of its first sentence to the last key of its last sentence. Flash attention instead starts a
tile of up to 128 rows for every sentence and head, most of which is empty where a sentence has some 30 tokens.

Shapes: R rows of queries and M rows of keys, H heads, K d_k, V d_v, S segments. Queries, keys and values are columns of
the tensors that the fused projections return, and their gradients are written to the same columns. The computation
follows FlashAttention-2 (Dao 2023): softmax is computed along the way, and the backward pass recomputes the weights
from the logarithm of their sum. No kernel uses atomic operations, so results are the same in every run.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from model.packed_attention import RowAttention, Segments, split_inputs

_LN_2 = tl.constexpr(math.log(2.0))


@triton.jit
def _bounds(ids, offsets, num_segments):
    """Return for each row the range of rows of the other side that its segment has; it is empty for padding."""
    is_alive = (ids >= 0) & (ids < num_segments)
    start = tl.load(offsets + ids, mask=is_alive, other=1 << 30)
    end = tl.load(offsets + ids + 1, mask=is_alive, other=0)
    return start, end


@triton.jit
def _first(start, HAS_DROPOUT: tl.constexpr):
    """Return where the loop over the other side begins: with dropout, at a multiple of 16; see `_kept`."""
    first = tl.min(start, 0)
    return first // 16 * 16 if HAS_DROPOUT else first


@triton.jit
def _load(tensor, stride, column, rows, is_read, SIZE: tl.constexpr, BLOCK: tl.constexpr, UPCAST: tl.constexpr):
    """Load SIZE columns of rows, and zeros up to BLOCK columns and where `is_read` is false.

    Padding is not read: its weights are zero, but zero times a number that is not finite is NaN.
    """
    columns = tl.arange(0, BLOCK)
    mask = is_read[:, None] & (columns < SIZE)[None, :]
    values = tl.load(tensor + rows.to(tl.int64)[:, None] * stride + (column + columns)[None, :], mask=mask, other=0.0)
    if UPCAST:
        values = values.to(tl.float32)
    return values


@triton.jit
def _store(tensor, stride, column, rows, num_rows, values, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Store the first SIZE of BLOCK columns of rows."""
    columns = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    places = tensor + rows.to(tl.int64)[:, None] * stride + (column + columns)[None, :]
    tl.store(places, values.to(tensor.dtype.element_ty), mask=mask)


@triton.jit
def _kept_scale(dropout):
    """Return the factor 1 / (1 - p) on weights that are kept."""
    return 1.0 / (1.0 - tl.load(dropout).to(tl.uint32).to(tl.float32) * 2.0**-32)


@triton.jit
def _pairs(first, SIZE: tl.constexpr):
    """Return the numbers from `first`, a multiple of 16, to first + SIZE - 1 in which the bit of value 8 is 0."""
    numbers = tl.arange(0, SIZE // 2)
    return (first + numbers // 8 * 16 + numbers % 8).to(tl.uint32)


@triton.jit
def _kept(dropout, first_row, first_key, head, num_heads, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Return which weights of a tile dropout keeps [ROWS, KEYS], as a function of seed, query, key and head alone.

    One call of Philox returns four numbers: for queries q and q + 8, each with keys k and k + 8. A thread of a matrix
    product holds these four weights in both directions, of queries by keys and of keys by queries, so that no number
    has to move between threads. Tiles begin at multiples of 16 therefore.
    """
    zero = tl.zeros([ROWS // 2, KEYS // 2], tl.uint32)
    first = zero + (_pairs(first_row, ROWS) * num_heads + head)[:, None].to(tl.uint32)
    second = zero + _pairs(first_key, KEYS)[None, :]
    threshold = tl.load(dropout).to(tl.uint32)
    offset = zero + tl.load(dropout + 2).to(tl.uint32)
    a, b, c, d = tl.philox(tl.load(dropout + 1), first, second, offset, zero, 7)
    kept = tl.join(tl.join(a >= threshold, b >= threshold), tl.join(c >= threshold, d >= threshold))
    kept = tl.reshape(kept, [ROWS // 16, 8, KEYS // 16, 8, 2, 2])
    return tl.reshape(tl.permute(kept, [0, 5, 1, 2, 4, 3]), [ROWS, KEYS])


@triton.jit
def _forward(
    query, key_value, result, log_sums, query_ids, key_offsets, dropout,
    num_queries, num_keys, num_segments, num_heads,
    query_stride, key_stride, result_stride, key_column, value_column,
    D_K: tl.constexpr, D_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    IS_CAUSAL: tl.constexpr, HAS_DROPOUT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
    SCALE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    rows = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    ids = tl.load(query_ids + rows, mask=rows < num_queries, other=-1)
    start, end = _bounds(ids, key_offsets, num_segments)
    if IS_CAUSAL:
        end = tl.minimum(end, rows + 1)
    last = tl.max(end, 0)
    q = _load(query, query_stride, head * D_K, rows, start < end, D_K, BLOCK_K, UPCAST)
    largest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, BLOCK_V], tl.float32)
    for first_key in range(_first(start, HAS_DROPOUT), last, KEYS):
        keys = first_key + tl.arange(0, KEYS)
        k = _load(key_value, key_stride, key_column + head * D_K, keys, keys < last, D_K, BLOCK_K, UPCAST)
        v = _load(key_value, key_stride, value_column + head * D_V, keys, keys < last, D_V, BLOCK_V, UPCAST)
        is_own = (keys[None, :] >= start[:, None]) & (keys[None, :] < end[:, None])
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * SCALE
        scores = tl.where(is_own, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        # Of rows that have met no key yet, the largest score is -inf.
        finite = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores - finite[:, None])
        shrink = tl.exp2(largest - finite)
        total = total * shrink + tl.sum(weights, 1)
        if HAS_DROPOUT:
            is_kept = _kept(dropout, tl.program_id(0) * QUERIES, first_key, head, num_heads, QUERIES, KEYS)
            weights = tl.where(is_kept, weights, 0.0)
        sums = sums * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        largest = new_largest
    has_keys = total > 0.0
    divisor = tl.where(has_keys, total, 1.0)
    sums = sums / divisor[:, None]
    if HAS_DROPOUT:
        sums = sums * _kept_scale(dropout)
    _store(result, result_stride, head * D_V, rows, num_queries, sums, D_V, BLOCK_V)
    log_sum = tl.where(has_keys, largest + tl.log2(divisor), 0.0)
    tl.store(log_sums + head * num_queries + rows, log_sum, mask=rows < num_queries)


@triton.jit
def _backward_queries(
    gradient, query, key_value, result, log_sums, products, grad_query, query_ids, key_offsets, dropout,
    num_queries, num_keys, num_segments, num_heads,
    query_stride, key_stride, result_stride, key_column, value_column,
    D_K: tl.constexpr, D_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    IS_CAUSAL: tl.constexpr, HAS_DROPOUT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
    SCALE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    rows = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    ids = tl.load(query_ids + rows, mask=rows < num_queries, other=-1)
    start, end = _bounds(ids, key_offsets, num_segments)
    if IS_CAUSAL:
        end = tl.minimum(end, rows + 1)
    last = tl.max(end, 0)
    q = _load(query, query_stride, head * D_K, rows, start < end, D_K, BLOCK_K, UPCAST)
    g = _load(gradient, result_stride, head * D_V, rows, start < end, D_V, BLOCK_V, UPCAST)
    o = _load(result, result_stride, head * D_V, rows, start < end, D_V, BLOCK_V, UPCAST)
    log_sum = tl.load(log_sums + head * num_queries + rows, mask=rows < num_queries, other=0.0)
    # Sum over keys of weights times their gradients, which is gradient . result.
    product = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
    tl.store(products + head * num_queries + rows, product, mask=rows < num_queries)
    sums = tl.zeros([QUERIES, BLOCK_K], tl.float32)
    for first_key in range(_first(start, HAS_DROPOUT), last, KEYS):
        keys = first_key + tl.arange(0, KEYS)
        k = _load(key_value, key_stride, key_column + head * D_K, keys, keys < last, D_K, BLOCK_K, UPCAST)
        v = _load(key_value, key_stride, value_column + head * D_V, keys, keys < last, D_V, BLOCK_V, UPCAST)
        is_own = (keys[None, :] >= start[:, None]) & (keys[None, :] < end[:, None])
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * SCALE
        weights = tl.where(is_own, tl.exp2(scores - log_sum[:, None]), 0.0)
        grad_weights = tl.dot(g, tl.trans(v), input_precision=PRECISION)
        if HAS_DROPOUT:
            is_kept = _kept(dropout, tl.program_id(0) * QUERIES, first_key, head, num_heads, QUERIES, KEYS)
            grad_weights = tl.where(is_kept, grad_weights * _kept_scale(dropout), 0.0)
        grad_scores = weights * (grad_weights - product[:, None])
        sums += tl.dot(grad_scores.to(k.dtype), k, input_precision=PRECISION)
    # `SCALE` includes 1 / ln 2, since powers of two are cheaper; the gradient of the scores does not have this factor.
    _store(grad_query, query_stride, head * D_K, rows, num_queries, sums * (SCALE * _LN_2), D_K, BLOCK_K)


@triton.jit
def _backward_keys(
    gradient, query, key_value, log_sums, products, grad_key_value, key_ids, query_offsets, dropout,
    num_queries, num_keys, num_segments, num_heads,
    query_stride, key_stride, result_stride, key_column, value_column,
    D_K: tl.constexpr, D_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    IS_CAUSAL: tl.constexpr, HAS_DROPOUT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
    SCALE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    keys = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    ids = tl.load(key_ids + keys, mask=keys < num_keys, other=-1)
    start, end = _bounds(ids, query_offsets, num_segments)
    if IS_CAUSAL:
        start = tl.maximum(start, keys)
    last = tl.max(end, 0)
    k = _load(key_value, key_stride, key_column + head * D_K, keys, start < end, D_K, BLOCK_K, UPCAST)
    v = _load(key_value, key_stride, value_column + head * D_V, keys, start < end, D_V, BLOCK_V, UPCAST)
    grad_k = tl.zeros([KEYS, BLOCK_K], tl.float32)
    grad_v = tl.zeros([KEYS, BLOCK_V], tl.float32)
    for first_row in range(_first(start, HAS_DROPOUT), last, QUERIES):
        rows = first_row + tl.arange(0, QUERIES)
        q = _load(query, query_stride, head * D_K, rows, rows < last, D_K, BLOCK_K, UPCAST)
        g = _load(gradient, result_stride, head * D_V, rows, rows < last, D_V, BLOCK_V, UPCAST)
        log_sum = tl.load(log_sums + head * num_queries + rows, mask=rows < num_queries, other=0.0)
        product = tl.load(products + head * num_queries + rows, mask=rows < num_queries, other=0.0)
        is_own = (rows[None, :] >= start[:, None]) & (rows[None, :] < end[:, None])
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION) * SCALE
        weights = tl.where(is_own, tl.exp2(scores - log_sum[None, :]), 0.0)
        grad_weights = tl.dot(v, tl.trans(g), input_precision=PRECISION)
        dropped = weights
        if HAS_DROPOUT:
            is_kept = tl.trans(_kept(dropout, first_row, tl.program_id(0) * KEYS, head, num_heads, QUERIES, KEYS))
            dropped = tl.where(is_kept, weights * _kept_scale(dropout), 0.0)
            grad_weights = tl.where(is_kept, grad_weights * _kept_scale(dropout), 0.0)
        grad_v += tl.dot(dropped.to(g.dtype), g, input_precision=PRECISION)
        grad_scores = weights * (grad_weights - product[None, :])
        grad_k += tl.dot(grad_scores.to(q.dtype), q, input_precision=PRECISION)
    grad_k = grad_k * (SCALE * _LN_2)
    _store(grad_key_value, key_stride, key_column + head * D_K, keys, num_keys, grad_k, D_K, BLOCK_K)
    _store(grad_key_value, key_stride, value_column + head * D_V, keys, num_keys, grad_v, D_V, BLOCK_V)


def tiles(kernel: Any, d_k: int, d_v: int, dtype: torch.dtype) -> dict[str, int]:
    """Return the compile-time arguments of a kernel on which its use of registers and shared memory depends.

    Rows and keys of a tile are chosen for sentences of 8 to 64 tokens, and so that no kernel spills registers on
    compute capability 8.0, 9.0 and 10.0, but for at most 40 bytes in float32 with dropout (Triton 3.7.1).
    """
    is_wide, is_forward = max(d_k, d_v) > 64, kernel is _forward
    if dtype == torch.float32:
        own, others = 32, 32 if is_forward and not is_wide else 16
    else:
        own, others = 32 if is_wide else 64, 64 if is_forward and not is_wide else 32
    queries, keys = (others, own) if kernel is _backward_keys else (own, others)
    warps = 8 if is_wide and dtype == torch.float32 else 4
    # Loops have few iterations, so a deeper pipeline would only take shared memory.
    return {"QUERIES": queries, "KEYS": keys, "num_warps": warps, "num_stages": 2}


@torch.library.triton_op("attention_pipeline::segment_attention", mutates_args={})
def segment_attention(
    inputs: list[Tensor], segments: list[Tensor], dropout: Tensor | None, num_heads: int, d_k: int, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Compute softmax(Q K^T / sqrt(d_k)) V (equation 1) within segments.

    Args:
        inputs: queries, keys and values [R, H * (2 K + V)]; or queries [R, H * K] and keys and values
            [M, H * (K + V)]. Float32, float16 or bfloat16.
        segments: int32 tensors. The segment of each query [R] and of each key [M], from 0, or a number out of range at
            padding; the offsets of queries and of keys [S + 1]: segment i has the rows from entry i to entry i + 1.
        dropout: see `dropout_state`; None for no dropout.
        num_heads: H.
        d_k: K.
        is_causal: row t attends to rows 0 to t of its segment only. Queries and keys have the same segments then.

    Returns:
        The result [R, H * V], which is zero at padding and where a segment has no keys; and for the backward pass the
        binary logarithms of the sums of exponentials [H, R].
    """
    inputs = [x.contiguous() for x in inputs]
    query, key_value = inputs[0], inputs[-1]
    result = query.new_empty(query.size(0), _width_of_values(inputs, num_heads, d_k))
    log_sums = query.new_empty(num_heads, query.size(0), dtype=torch.float32)
    tensors = (query, key_value, result, log_sums, segments[0], segments[3], _or_placeholder(dropout, log_sums))
    _launch(_forward, tensors, inputs, segments, dropout, num_heads, d_k, is_causal)
    return result, log_sums


@torch.library.triton_op("attention_pipeline::segment_attention_backward", mutates_args={})
def segment_attention_backward(
    gradient: Tensor,
    results: list[Tensor],
    inputs: list[Tensor],
    segments: list[Tensor],
    dropout: Tensor | None,
    num_heads: int,
    d_k: int,
    is_causal: bool,
) -> list[Tensor]:
    """Return the gradients of `inputs` of `segment_attention`, given that of its result and both of its results."""
    inputs = [x.contiguous() for x in inputs]
    query, key_value = inputs[0], inputs[-1]
    gradients = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
    result, log_sums = results
    products = torch.empty_like(log_sums)
    gradient = gradient.contiguous()
    ids, key_ids, offsets, key_offsets = segments
    unread = _or_placeholder(dropout, log_sums)
    options = (inputs, segments, dropout, num_heads, d_k, is_causal)
    by_query = (gradient, query, key_value, result, log_sums, products, gradients[0], ids, key_offsets, unread)
    _launch(_backward_queries, by_query, *options)
    by_key = (gradient, query, key_value, log_sums, products, gradients[-1], key_ids, offsets, unread)
    _launch(_backward_keys, by_key, *options)
    return gradients


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, segments, dropout, *ctx.options = inputs
    ctx.has_dropout = dropout is not None
    ctx.save_for_backward(*output, *tensors, *segments, *([] if dropout is None else [dropout]))


def _backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[object, ...]:
    saved = list(ctx.saved_tensors)
    dropout = saved.pop() if ctx.has_dropout else None
    results, inputs, segments = saved[:2], saved[2:-4], saved[-4:]
    gradients = segment_attention_backward(gradient, results, inputs, segments, dropout, *ctx.options)
    return gradients, [None] * len(segments), None, None, None, None


segment_attention.register_autograd(_backward, setup_context=_setup_context)


def dropout_state(probability: float, device: torch.device) -> Tensor:
    """Draw what decides which weights one call of attention drops.

    The backward pass decides the same from it, so that nothing of the size of the weights is kept.

    Returns:
        int64 [3]: the probability as a share of 2^32, and two random numbers below 2^31 from the device's generator.
    """
    state = torch.randint(1 << 31, (3,), device=device)
    state[0] = round(probability * 2**32)
    return state


def attention(inputs: list[Tensor], segments: Segments, num_heads: int, d_k: int, dropout: float) -> Tensor:
    """Do what `model.packed_attention.flash_attention` does, for all types, with dropout, and heads up to 128 wide."""
    assert segments.query_ids is not None
    assert segments.key_ids is not None
    sides = [segments.query_ids, segments.key_ids, segments.query_offsets, segments.key_offsets]
    state = dropout_state(dropout, inputs[0].device) if dropout else None
    return segment_attention(inputs, sides, state, num_heads, d_k, segments.is_causal)[0]


TRITON_ATTENTION = RowAttention("Triton", attention, reads_ids=True)


def _width_of_values(inputs: list[Tensor], num_heads: int, d_k: int) -> int:
    return split_inputs(inputs, num_heads * d_k)[2].size(1)


def _or_placeholder(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Return a tensor for an argument that a kernel does not read if `tensor` is None."""
    return other if tensor is None else tensor


def _launch(
    kernel: Any,
    tensors: tuple[Tensor, ...],
    inputs: list[Tensor],
    segments: list[Tensor],
    dropout: Tensor | None,
    num_heads: int,
    d_k: int,
    is_causal: bool,
) -> None:
    """Run a kernel on its tensors; the other arguments are those of `segment_attention`."""
    query, key_value = inputs[0], inputs[-1]
    num_queries, num_keys = query.size(0), key_value.size(0)
    d_v = _width_of_values(inputs, num_heads, d_k) // num_heads
    key_column = num_heads * d_k if len(inputs) == 1 else 0
    sizes = (
        *(num_queries, num_keys, segments[2].numel() - 1, num_heads),
        *(query.size(1), key_value.size(1), num_heads * d_v, key_column, key_column + num_heads * d_k),
    )
    is_interpreted = not isinstance(kernel, JITFunction)
    tile = tiles(kernel, d_k, d_v, query.dtype)
    is_exact = query.dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest"
    rows, size = (num_keys, tile["KEYS"]) if kernel is _backward_keys else (num_queries, tile["QUERIES"])
    launcher = kernel if is_interpreted else torch.library.wrap_triton(kernel)
    launcher[(triton.cdiv(rows, size), num_heads)](
        *tensors,
        *sizes,
        **{"D_K": d_k, "D_V": d_v, "BLOCK_K": _block(d_k), "BLOCK_V": _block(d_v)},
        IS_CAUSAL=is_causal,
        HAS_DROPOUT=dropout is not None,
        UPCAST=is_interpreted and query.dtype == torch.bfloat16,  # whose products Triton's interpreter gets wrong
        PRECISION="ieee" if is_exact else "tf32",
        SCALE=1.0 / (math.sqrt(d_k) * math.log(2.0)),
        **tile,
    )


def _block(size: int) -> int:
    return max(16, triton.next_power_of_2(size))
