"""Multi-head attention (section 3.2).

Shapes: B batch, T queries, S keys, D d_model, H heads, K d_k, V d_v.
A mask is True where attention is allowed and broadcasts to [B, H, T, S].
Deviation: the projections have biases, as torch.nn.MultiheadAttention's; the paper's formulas have none.

Nothing here hands out attention weights while training. To look at them, `weights` works them out from the same
inputs (see `attention_maps.py`).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.cpu.linear import Linear
from model.settings import NetworkSettings


def attention_weights(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """softmax(Q K^T / sqrt(d_k)), equation 1 without V.

    Args:
        query: [B, H, T, K].
        key: [B, H, S, K].
        mask: True where allowed, or None.
        is_causal: query t sees keys 0 .. t only.

    Returns: [B, H, T, S], rows that sum to one.
    """
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.size(-1))
    if is_causal:
        causal = torch.ones(query.size(2), key.size(2), dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~causal, float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1)


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """softmax(Q K^T / sqrt(d_k)) V (equation 1). Give a mask or is_causal, never both.

    By the fused kernel, but where its backward pass is slow: for bf16 on a CPU it takes eight times as long as
    plain products at sentence lengths (torch 2.13). From 256 tokens on it is kept, since it needs no T x S memory.

    Args:
        query: [B, H, T, K].
        key: [B, H, S, K].
        value: [B, H, S, V].
        mask: True where allowed, or None.
        is_causal: query t sees keys 0 .. t only.

    Returns: [B, H, T, V].
    """
    slow_backward = query.device.type == "cpu" and query.dtype == torch.bfloat16 and query.requires_grad
    if not slow_backward or query.size(2) > 256 or key.size(2) > 256:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=is_causal)
    scores = (query * (1.0 / math.sqrt(query.size(-1)))) @ key.transpose(-2, -1)
    if is_causal:
        mask = torch.ones(query.size(2), key.size(2), dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        bias = torch.zeros(mask.shape, dtype=scores.dtype, device=mask.device)
        scores = scores + bias.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ value


def attention_step(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """As `attend` without a gradient, for the few queries of a decoding step.

    For many sentences on a CPU plain products are faster than the fused kernel: at one query twice (torch 2.13).

    Args:
        query: [B, H, N, K].
        key: [B, H, S, K].
        value: [B, H, S, V].
        bias: added to the scores: 0 where attention is allowed and -inf elsewhere, in query's type; or None.

    Returns: [B, H, N, V].
    """
    if query.device.type != "cpu" or query.size(0) <= 8:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
    scores = (query * (1.0 / math.sqrt(query.size(-1)))) @ key.transpose(-2, -1)
    if bias is not None:
        scores += bias
    return scores.softmax(-1) @ value


def grow_cache(
    cache: list[tuple[Tensor, Tensor, Tensor, Tensor]], paths: Tensor, used_slots: int, num_new: int
) -> tuple[list[tuple[Tensor, Tensor, Tensor, Tensor]], Tensor]:
    """A larger cache of those slots that are on some path, and the paths through it.

    Of the slots on the paths, bool [B, N, slots], the last `num_new` are still to be written.
    """
    needed = paths[:, :, :used_slots].any(1)
    num_needed = int(needed.sum(1).max())
    # Sentences that need fewer keep some that are on no path.
    places = needed.byte().topk(num_needed).indices.unsqueeze(1)
    sentences = torch.arange(paths.size(0), device=paths.device)[:, None, None]
    heads = torch.arange(cache[0][0].size(1), device=paths.device)[:, None]
    larger: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for keys, values, memory_keys, memory_values in cache:
        batch_size, num_heads, num_slots = keys.size(0), keys.size(1), num_needed + max(8 * num_new, num_needed)
        new_keys = keys.new_empty([batch_size, num_heads, num_slots, keys.size(3)])
        new_values = values.new_empty([batch_size, num_heads, num_slots, values.size(3)])
        new_keys[:, :, :num_needed] = keys[sentences, heads, places]
        new_values[:, :, :num_needed] = values[sentences, heads, places]
        larger.append((new_keys, new_values, memory_keys, memory_values))
    kept = paths.gather(2, places.expand(-1, paths.size(1), -1))
    return larger, torch.cat([kept, paths[:, :, used_slots:]], 2)


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """[B, T, H * K] -> [B, H, T, K], a view."""
    return x.view(x.size(0), x.size(1), num_heads, x.size(2) // num_heads).transpose(1, 2)


class SelfAttention(nn.Module):
    """Queries, keys and values from one sequence; the three projections are one product."""

    def __init__(self, settings: NetworkSettings) -> None:
        super().__init__()
        d_model, num_heads, d_k, d_v = settings.d_model, settings.num_heads, settings.key_size, settings.value_size
        self.num_heads, self.d_k, self.d_v = num_heads, d_k, d_v
        self.query_key_value = Linear(d_model, num_heads * (2 * d_k + d_v))
        self.output = Linear(num_heads * d_v, d_model)
        # Xavier by projection, not over the fused matrix: its spread must not depend on the fusing.
        for part in self.query_key_value.weight.split([num_heads * d_k, num_heads * d_k, num_heads * d_v]):
            nn.init.xavier_uniform_(part)
        nn.init.xavier_uniform_(self.output.weight)
        nn.init.zeros_(self.query_key_value.bias)
        nn.init.zeros_(self.output.bias)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, D] -> queries and keys [B, H, T, K], values [B, H, T, V]."""
        keys_size = self.num_heads * self.d_k
        query, key, value = self.query_key_value(x).split([keys_size, keys_size, self.num_heads * self.d_v], -1)
        heads = self.num_heads
        return split_heads(query, heads), split_heads(key, heads), split_heads(value, heads)

    def forward(self, x: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        """[B, T, D] -> [B, T, D]. Give a mask or is_causal, never both."""
        query, key, value = self.project(x)
        heads = attention(query, key, value, mask, is_causal)
        return self.output(heads.transpose(1, 2).flatten(2))

    def step(self, x: Tensor, keys: Tensor, values: Tensor, start: int, bias: Tensor | None) -> Tensor:
        """One more position of N hypotheses a sentence, which are the queries.

        Args:
            x: [B, N, D].
            keys: the cache [B, H, slots, K], written in place at slots start .. start + N - 1.
            values: [B, H, slots, V], likewise.
            start: how many slots are in use.
            bias: [B, 1, N, start + N], 0 at the slots each hypothesis descends from and -inf elsewhere; or None.

        Returns: [B, N, D].
        """
        query, key, value = self.project(x)
        num_hypotheses = x.size(1)
        keys.narrow(2, start, num_hypotheses).copy_(key)
        values.narrow(2, start, num_hypotheses).copy_(value)
        end = start + num_hypotheses
        heads = attention_step(query, keys.narrow(2, 0, end), values.narrow(2, 0, end), bias)
        return self.output(heads.transpose(1, 2).flatten(2))

    @torch.jit.unused
    def weights(self, x: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        """What `forward` attends to on the same inputs: [B, H, T, T]."""
        query, key, _ = self.project(x)
        return attention_weights(query, key, mask, is_causal)


class CrossAttention(nn.Module):
    """Queries from the decoder, keys and values from the encoder's output."""

    def __init__(self, settings: NetworkSettings) -> None:
        super().__init__()
        d_model, num_heads, d_k, d_v = settings.d_model, settings.num_heads, settings.key_size, settings.value_size
        self.num_heads, self.d_k, self.d_v = num_heads, d_k, d_v
        self.query = Linear(d_model, num_heads * d_k)
        self.key_value = Linear(d_model, num_heads * (d_k + d_v))
        self.output = Linear(num_heads * d_v, d_model)
        nn.init.xavier_uniform_(self.query.weight)
        for part in self.key_value.weight.split([num_heads * d_k, num_heads * d_v]):
            nn.init.xavier_uniform_(part)
        nn.init.xavier_uniform_(self.output.weight)
        for linear in (self.query, self.key_value, self.output):
            nn.init.zeros_(linear.bias)

    def keys_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, D] -> keys [B, H, S, K], values [B, H, S, V]; decoding computes them once a sentence."""
        key, value = self.key_value(memory).split([self.num_heads * self.d_k, self.num_heads * self.d_v], -1)
        return split_heads(key, self.num_heads), split_heads(value, self.num_heads)

    def attend(self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """[B, T, D] over given keys and values -> [B, T, D]."""
        query = split_heads(self.query(x), self.num_heads)
        heads = attention(query, keys, values, mask, False)
        return self.output(heads.transpose(1, 2).flatten(2))

    def step(self, x: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
        """As `attend`, for the N hypotheses of a decoding step: [B, N, D] -> [B, N, D]; bias [B, 1, 1, S]."""
        query = split_heads(self.query(x), self.num_heads)
        heads = attention_step(query, keys, values, bias)
        return self.output(heads.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        """[B, T, D] over memory [B, S, D] -> [B, T, D]."""
        keys, values = self.keys_values(memory)
        return self.attend(x, keys, values, mask)

    @torch.jit.unused
    def weights(self, x: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        """What `forward` attends to on the same inputs: [B, H, T, S]."""
        query = split_heads(self.query(x), self.num_heads)
        return attention_weights(query, self.keys_values(memory)[0], mask, False)
