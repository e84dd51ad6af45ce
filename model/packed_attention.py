"""Attention over a packed micro-batch: rows of sentences, in which each token attends to its own sentence only.

Shapes: R query tokens and M key tokens, H heads, K d_k, V d_v.

There are two layouts. Sentences end to end, as the offsets of `Segments` describe them, go to the attention that the
backend names: on a GPU Triton's or, by default, PyTorch's variable-length flash attention, on a CPU the compiled one.
In blocks, as `Segments.biases` describe them, no sentence crosses the border of a block, and a block of the target
holds the sentences of the same block of the source. Attention is then a product of whole blocks in which a bias hides
other sentences. Where PyTorch's operators compute on a CPU, this is faster than products of single sentences, although
most of a block is hidden: products, softmax and copies run on full vectors.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from data_module.batching.batch import PackedBatch
from model.fast.dropout import LEVELS, dropout_factors

KEPT_WIDTH = 256
"""Weights of wider blocks are not kept for the backward pass, which computes them again. A block's weights
grow with the square of its width, so a few long sentences would decide how much memory a step needs."""
_CHUNK_SCORES = 1 << 18
"""Scores per thread that are computed at a time, so that they stay in the processor's cache."""
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)), (31, None))
"""Constants of SplitMix64 (Steele et al. 2014), as signed numbers."""


class Segments(NamedTuple):
    """Which tokens attend to which, in one attention of the network."""

    query_offsets: Tensor
    """int32 [segments + 1]: segment i has the tokens from entry i to entry i + 1. Not used in blocks."""
    key_offsets: Tensor
    """The same for keys."""
    longest: int
    """Maximum number of tokens of a segment."""
    is_causal: bool
    """Whether a query attends to the keys up to its own place in the segment only."""
    query_ids: Tensor | None
    """int32 [R], the segment of each token, or a number out of range at padding; None if they are not read."""
    key_ids: Tensor | None
    """The same for keys."""
    attention: "AttentionFunction"
    biases: list[Tensor]
    """Of each width W of blocks, [blocks * W, W]: 0 where attention is allowed and -inf elsewhere. The blocks follow
    one another in the row. Empty if sentences lie end to end.

    Blocks and their tokens share a dimension, since the compiler would make other graphs for a single block."""


AttentionFunction = Callable[[list[Tensor], Segments, Tensor | None, int, int], Tensor]
"""Computes attention (equation 1); see `flash_attention`."""


class Attention(NamedTuple):
    """An implementation of attention over sentences that lie end to end."""

    name: str
    function: AttentionFunction
    reads_ids: bool = False
    """Whether it reads `query_ids` and `key_ids` of `Segments`."""
    constant_rows: bool = True
    """Whether all rows should have one length, so that a GPU runs the same shapes in all steps."""


def packed_segments(
    batch: PackedBatch, dtype: torch.dtype, attention: Attention | None = None
) -> tuple[Segments, Segments, Segments]:
    """Return the segments of the encoder, of the decoder's self-attention and of its cross-attention.

    Args:
        batch: a packed micro-batch.
        dtype: type of queries, keys and values.
        attention: for sentences that lie end to end; None for PyTorch's.
    """
    attention = BLOCK_ATTENTION if batch.blocks else attention or PYTORCH_ATTENTION
    source: tuple[Tensor, Tensor | None] = batch.source_segments, None
    target: tuple[Tensor, Tensor | None] = batch.target_segments, None
    if attention.reads_ids:
        source = source[0], _segment_ids(source[0], batch.source.numel())
        target = target[0], _segment_ids(target[0], batch.target_input.numel())
    encoder, decoder, cross = (
        Segments(
            query[0],
            key[0],
            batch.longest,
            is_causal,
            query[1],
            key[1],
            attention.function,
            _biases(batch, query[0], key[0], is_causal, dtype),
        )
        for query, key, is_causal in ((source, source, False), (target, target, True), (target, source, False))
    )
    return encoder, decoder, cross


def _segment_ids(offsets: Tensor, num_tokens: int) -> Tensor:
    """Return the segment of each token, int32 [R]: the number of segments that end at or before it."""
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=offsets.device)
    return torch.searchsorted(offsets[1:], tokens, out_int32=True, right=True)


def _biases(batch: PackedBatch, query: Tensor, key: Tensor, is_causal: bool, dtype: torch.dtype) -> list[Tensor]:
    biases, first = [], 0
    for count, width in batch.blocks:
        tokens = slice(first, first + count * width)
        queries, keys = (side[tokens].view(count, width) for side in (query, key))
        biases.append(block_bias(queries, keys, is_causal, dtype))
        first = tokens.stop
    return biases


def block_bias(query_segments: Tensor, key_segments: Tensor, is_causal: bool, dtype: torch.dtype) -> Tensor:
    """Return the bias of blocks of one width.

    Args:
        query_segments: int [blocks, W], the sentence of each token, or -1 at padding.
        key_segments: the same for keys.
        is_causal: query t attends to keys 0 to t only.
        dtype: type of the scores.

    Returns:
        [blocks * W, W], not a view, since the compiler would look at the sizes of what it is a view of. Queries that
        are padding may attend to all keys: without any, their softmax would be NaN, which times 0 is NaN in the
        gradients of other tokens.
    """
    allowed = query_segments[:, :, None] == key_segments[:, None, :]
    if is_causal:
        allowed &= torch.ones(allowed.shape[1:], dtype=torch.bool, device=allowed.device).tril()
    allowed |= query_segments[:, :, None] < 0
    bias = torch.zeros(allowed.flatten(0, 1).shape, dtype=dtype, device=allowed.device)
    return bias.masked_fill_(~allowed.flatten(0, 1), float("-inf"))


def self_attention(projected: Tensor, segments: Segments, num_heads: int, d_k: int, dropout: float = 0.0) -> Tensor:
    """Compute self-attention (equation 1) of fused queries, keys and values.

    Args:
        projected: [R, H * (2 K + V)].
        segments: which tokens attend to which.
        num_heads: H.
        d_k: K.
        dropout: probability of dropping a weight. PyTorch's flash attention for sentences end to end has no dropout.

    Returns:
        [R, H * V].
    """
    return _attention([projected], segments, num_heads, d_k, dropout)


def cross_attention(
    query: Tensor, key_value: Tensor, segments: Segments, num_heads: int, d_k: int, dropout: float = 0.0
) -> Tensor:
    """Compute attention (equation 1) of queries [R, H * K] over fused keys and values [M, H * (K + V)]: [R, H * V]."""
    return _attention([query, key_value], segments, num_heads, d_k, dropout)


def _attention(inputs: list[Tensor], segments: Segments, num_heads: int, d_k: int, dropout: float) -> Tensor:
    state = dropout_state(dropout, inputs[0].device) if dropout else None
    return segments.attention(inputs, segments, state, num_heads, d_k)


def dropout_state(probability: float, device: torch.device) -> Tensor:
    """Draw what decides which weights one call of attention drops.

    The backward pass decides the same from it, so that nothing of the size of the weights is kept.

    Returns:
        int64 [3]: the probability as a share of 2^32, and two random numbers below 2^31 from the device's generator.
    """
    state = torch.randint(1 << 31, (3,), device=device)
    state[0] = round(probability * 2**32)
    return state


def flash_attention(
    inputs: list[Tensor], segments: Segments, dropout: Tensor | None, num_heads: int, d_k: int
) -> Tensor:
    """Compute attention (equation 1) over sentences that lie end to end, by PyTorch's variable-length attention.

    It needs a GPU of compute capability 8.0, 16-bit numbers, and heads with d_k = d_v, a multiple of 8 up to 256.

    Args:
        inputs: queries, keys and values [R, H * (2 K + V)]; or queries [R, H * K] and keys and values
            [M, H * (K + V)].
        segments: which tokens attend to which.
        dropout: see `dropout_state`; None for no dropout.
        num_heads: H.
        d_k: K.

    Returns:
        [R, H * V].

    Raises:
        ValueError: there is dropout, which PyTorch's kernel does not have.
    """
    if dropout is not None:
        raise ValueError("sentences have to be placed in blocks for attention dropout")
    return _flash(*_heads(inputs[0], inputs[1] if len(inputs) == 2 else None, num_heads, d_k), segments)


def _attention_in_blocks(
    inputs: list[Tensor], segments: Segments, dropout: Tensor | None, num_heads: int, d_k: int
) -> Tensor:
    """Do what `flash_attention` does for sentences in blocks, on any device and for any heads."""
    key_value = inputs[1] if len(inputs) == 2 else None
    return block_attention(inputs[0], key_value, segments.biases, dropout, num_heads, d_k)[0]


PYTORCH_ATTENTION = Attention("PyTorch", flash_attention)
BLOCK_ATTENTION = Attention("PyTorch", _attention_in_blocks)


def _flash(query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    window = (-1, 0) if segments.is_causal else (-1, -1)
    offsets, longest = (segments.query_offsets, segments.key_offsets), segments.longest
    result: Any = varlen_attn(query, key, value, *offsets, longest, longest, window_size=window)
    return result.flatten(1)


def _heads(query: Tensor, key_value: Tensor | None, num_heads: int, d_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of queries [R, H, K], keys [M, H, K] and values [M, H, V]; `key_value` is None if all are fused."""
    size = num_heads * d_k
    if key_value is None:
        queries, keys, values = query.split([size, size, query.size(1) - 2 * size], 1)
    else:
        queries = query
        keys, values = key_value.split([size, key_value.size(1) - size], 1)
    return (
        queries.unflatten(1, (num_heads, -1)),
        keys.unflatten(1, (num_heads, -1)),
        values.unflatten(1, (num_heads, -1)),
    )


@torch.library.custom_op("attention_pipeline::block_attention", mutates_args=())
def block_attention(
    query: Tensor, key_value: Tensor | None, biases: list[Tensor], dropout: Tensor | None, num_heads: int, d_k: int
) -> tuple[Tensor, Tensor]:
    """Compute attention in blocks.

    It is one operator for the compiler, since the number of blocks differs between micro-batches.

    Args:
        query: [R, H * K], or with keys and values [R, H * (2 K + V)].
        key_value: [R, H * (K + V)], or None if they are in `query`.
        biases: see `Segments`; in the dtype of `query`.
        dropout: see `dropout_state`; None for no dropout.
        num_heads: H.
        d_k: K.

    Returns:
        The result [R, H * V], which is zero for tokens that are in no block; and the weights, before dropout, of all
        blocks of at most `KEPT_WIDTH`, flat.
    """
    queries, keys, values = _heads(query, key_value, num_heads, d_k)
    num_weights, biases = _num_weights(biases, num_heads), _by_block(biases)
    result = query.new_empty(query.size(0), num_heads, values.size(2))
    weights = query.new_empty(num_weights)
    first_weight = first = 0
    with torch.autocast(query.device.type, enabled=False):
        for bias in biases:
            # A few blocks at a time, so that their scores are still in the cache for softmax and the second product.
            for start, end in _chunks(bias, num_heads):
                tokens = slice(first + start * bias.size(1), first + end * bias.size(1))
                width, blocks = bias.size(1), end - start
                q, k, v = (_by_head(x[tokens], width) for x in (queries, keys, values))
                kept = None
                if width <= KEPT_WIDTH:
                    count = blocks * num_heads * width * width
                    # Written in place by the product and softmax below, which saves a copy.
                    kept = weights[first_weight : first_weight + count].view(-1, width, width)
                    first_weight += count
                p = _weights(q, k, bias[start:end], kept)
                if dropout is not None:
                    p = p * _kept_weights(p, blocks, dropout, first + start * width)
                chunk = torch.bmm(p, v)
                target = result[tokens].view(blocks, width, num_heads, -1)
                target.copy_(chunk.view(blocks, num_heads, width, -1).transpose(1, 2))
            first += bias.size(0) * bias.size(1)
    result[first:] = 0.0
    return result.flatten(1), weights


@block_attention.register_fake
def _(
    query: Tensor, key_value: Tensor | None, biases: list[Tensor], dropout: Tensor | None, num_heads: int, d_k: int
) -> tuple[Tensor, Tensor]:
    values = (query.size(1) - 2 * num_heads * d_k) if key_value is None else (key_value.size(1) - num_heads * d_k)
    return query.new_empty(query.size(0), values), query.new_empty(_num_weights(biases, num_heads))


@torch.library.custom_op("attention_pipeline::block_attention_backward", mutates_args=())
def block_attention_backward(
    gradient: Tensor,
    weights: Tensor,
    query: Tensor,
    key_value: Tensor | None,
    biases: list[Tensor],
    dropout: Tensor | None,
    num_heads: int,
    d_k: int,
) -> list[Tensor]:
    """Return the gradients of `query` and, if it is not None, `key_value` of `block_attention`."""
    inputs = [query] if key_value is None else [query, key_value]
    results = [torch.empty_like(x) for x in inputs]
    biases = _by_block(biases)
    queries, keys, values = _heads(query, key_value, num_heads, d_k)
    grad_queries, grad_keys, grad_values = _heads(results[0], None if key_value is None else results[1], num_heads, d_k)
    gradient = gradient.unflatten(1, (num_heads, -1))
    scale = 1.0 / math.sqrt(d_k)
    first_weight = first = 0
    with torch.autocast(query.device.type, enabled=False):
        for bias in biases:
            for start, end in _chunks(bias, num_heads):
                tokens = slice(first + start * bias.size(1), first + end * bias.size(1))
                width, blocks = bias.size(1), end - start
                q, k, v, g = (_by_head(x[tokens], width) for x in (queries, keys, values, gradient))
                if width <= KEPT_WIDTH:
                    count = blocks * num_heads * width * width
                    p = weights[first_weight : first_weight + count].view(-1, width, width)
                    first_weight += count
                else:
                    p = _weights(q, k, bias[start:end], None)
                # With the factors f of dropout, the result is (p * f) v, so dv = (p * f)^T g and dp = (g v^T) * f.
                dropped, grad_weights = p, torch.bmm(g, v.transpose(1, 2))
                if dropout is not None:
                    kept = _kept_weights(p, blocks, dropout, first + start * width)
                    dropped, grad_weights = p * kept, grad_weights.mul_(kept)
                _put(grad_values[tokens], torch.bmm(dropped.transpose(1, 2), g), width, 1.0)
                # d softmax: p * (dp - sum(p * dp)), by the weights before dropout.
                ds = _softmax_gradient(grad_weights, p)
                _put(grad_queries[tokens], torch.bmm(ds, k), width, scale)
                _put(grad_keys[tokens], torch.bmm(ds.transpose(1, 2), q), width, scale)
            first += bias.size(0) * bias.size(1)
    for x in results:
        x[first:] = 0.0
    return results


@block_attention_backward.register_fake
def _(
    gradient: Tensor,
    weights: Tensor,
    query: Tensor,
    key_value: Tensor | None,
    biases: list[Tensor],
    dropout: Tensor | None,
    num_heads: int,
    d_k: int,
) -> list[Tensor]:
    return [torch.empty_like(x) for x in ([query] if key_value is None else [query, key_value])]


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    query, key_value, biases, dropout, ctx.num_heads, ctx.d_k = inputs
    ctx.is_fused, ctx.has_dropout = key_value is None, dropout is not None
    optional = [tensor for tensor in (key_value, dropout) if tensor is not None]
    ctx.save_for_backward(output[1], query, *optional, *biases)


def _backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    weights, query, *biases = ctx.saved_tensors
    key_value = None if ctx.is_fused else biases.pop(0)
    dropout = biases.pop(0) if ctx.has_dropout else None
    gradients = block_attention_backward(gradient, weights, query, key_value, biases, dropout, ctx.num_heads, ctx.d_k)
    return gradients[0], None if ctx.is_fused else gradients[1], [None] * len(biases), None, None, None


block_attention.register_autograd(_backward, setup_context=_setup_context)


def _num_weights(biases: list[Tensor], num_heads: int) -> int:
    return num_heads * sum(bias.numel() for bias in biases if bias.size(1) <= KEPT_WIDTH)


def _by_block(biases: list[Tensor]) -> list[Tensor]:
    """Return views [blocks, W, W]."""
    return [bias.unflatten(0, (-1, bias.size(1))) for bias in biases]


def _chunks(bias: Tensor, num_heads: int) -> list[tuple[int, int]]:
    """Return the first and the last block of each chunk."""
    scores = num_heads * bias.size(1) ** 2
    size = max(1, _CHUNK_SCORES * torch.get_num_threads() // scores) if bias.device.type == "cpu" else bias.size(0)
    return [(start, min(start + size, bias.size(0))) for start in range(0, bias.size(0), size)]


def _by_head(x: Tensor, width: int) -> Tensor:
    """Copy tokens [blocks * W, H, K] to [blocks * H, W, K]."""
    return x.unflatten(0, (-1, width)).transpose(1, 2).contiguous().flatten(0, 1)


def _put(tokens: Tensor, x: Tensor, width: int, factor: float) -> None:
    """Write x [blocks * H, W, K], times a factor, to tokens [blocks * W, H, K]."""
    x, place = x.unflatten(0, (-1, tokens.size(1))).transpose(1, 2), tokens.unflatten(0, (-1, width))
    torch.mul(x, factor, out=place) if factor != 1.0 else place.copy_(x)


def _weights(query: Tensor, key: Tensor, bias: Tensor, out: Tensor | None) -> Tensor:
    """Return softmax(Q K^T / sqrt(d_k) + bias) [blocks * H, W, W]."""
    num_blocks, width = bias.size(0), bias.size(1)
    scores = (
        torch.bmm(query, key.transpose(1, 2), out=out) if out is not None else torch.bmm(query, key.transpose(1, 2))
    )
    scores.mul_(1.0 / math.sqrt(query.size(2)))
    scores.view(num_blocks, -1, width, width).add_(bias.unsqueeze(1))
    return torch.softmax(scores, -1, out=scores)


def _kept_weights(weights: Tensor, num_blocks: int, dropout: Tensor, first_token: int) -> Tensor:
    """Return factors [blocks * H, W, W] on weights: 0 where they are dropped, and 1 / (1 - probability) elsewhere.

    They are a function of the draws, of a block's first token and of the place within the block, whatever blocks are
    computed together. The probability is rounded to a multiple of 1 / 32,768, as in `model.fast.dropout`.
    """
    # SplitMix64 of a counter. An int64 has four numbers of 16 bits.
    size, width = weights.numel() // num_blocks, weights.size(-1)
    counters = torch.arange(num_blocks, device=weights.device).mul_(width).add_(first_token).mul_(1 << 32)
    numbers = counters.add_(dropout[1]).unsqueeze(1) + torch.arange((size + 3) // 4, device=weights.device)
    numbers.mul_(_GOLDEN_GAMMA).add_(dropout[2])
    for shift, factor in _MIX:
        # Shifts copy the sign.
        numbers.bitwise_xor_((numbers >> shift).bitwise_and_((1 << (64 - shift)) - 1))
        if factor is not None:
            numbers.mul_(factor)
    bits = numbers.view(torch.int16)[:, :size].reshape(weights.shape)
    dropped = ((dropout[0] * LEVELS + (1 << 31)) >> 32).clamp_(max=LEVELS - 1)
    return dropout_factors(bits, dropped, (LEVELS / (LEVELS - dropped.double())).to(weights.dtype))


def _softmax_gradient(gradient: Tensor, weights: Tensor) -> Tensor:
    return torch._softmax_backward_data(gradient, weights, -1, weights.dtype)
