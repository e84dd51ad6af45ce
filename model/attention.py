"""Multi-head attention (section 3.2).

Shapes: B batch, T queries, S keys, D d_model, H heads, K d_k, V d_v.
A mask is True where attention is allowed and broadcasts to [B, H, T, S].
Unlike the paper's formulas, the projections have biases, as in torch.nn.MultiheadAttention.

Training packs sentences into rows without padding (`packed`, see `packed_attention.py`); decoding and validation use
padded batches. Attention weights are no result: `weights` recomputes them for inspection from the same inputs (see
`attention_maps.py`).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.fast.cast_weights import cast_linear
from model.packed_attention import Segments, cross_attention, self_attention
from model.settings import NetworkSettings


def attention_weights(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """Compute softmax(Q K^T / sqrt(d_k)), which is equation 1 without V.

    Args:
        query: [B, H, T, K].
        key: [B, H, S, K].
        mask: True where attention is allowed, or None.
        is_causal: query t attends to keys 0 to t only.

    Returns:
        [B, H, T, S]. Rows sum to one.
    """
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.size(-1))
    if is_causal:
        causal = torch.ones(query.size(2), key.size(2), dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~causal, float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1)


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, dropout: float = 0.0
) -> Tensor:
    """Compute softmax(Q K^T / sqrt(d_k)) V (equation 1) by PyTorch's fused kernel.

    Args:
        query: [B, H, T, K].
        key: [B, H, S, K].
        value: [B, H, S, V].
        mask: True where attention is allowed, or None. Must be None if `is_causal`.
        is_causal: query t attends to keys 0 to t only.
        dropout: probability of dropping a weight.

    Returns:
        [B, H, T, V].
    """
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=is_causal)


def attention_step(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """Compute attention for the few queries of a decoding step, without gradients.

    For more than 8 sentences on a CPU, plain products are faster than the fused kernel, by a factor of two for one
    query (torch 2.13).

    Args:
        query: [B, H, N, K].
        key: [B, H, S, K].
        value: [B, H, S, V].
        bias: added to the scores, 0 where attention is allowed and -inf elsewhere, in the query's dtype; or None.

    Returns:
        [B, H, N, V].
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
    """Copy the slots that are on a path to a larger cache.

    Args:
        cache: for each decoder layer, keys and values of self-attention and of cross-attention.
        paths: bool [B, N, used_slots + num_new], True at the slots that each hypothesis attends to. The last
            `num_new` are not written yet.
        used_slots: number of slots in use.
        num_new: number of slots that the next step writes.

    Returns:
        The larger cache and the paths through it.
    """
    needed = paths[:, :, :used_slots].any(1)
    num_needed = int(needed.sum(1).max())
    # Sentences that need fewer slots also keep some that are on no path.
    places = needed.byte().topk(num_needed).indices.unsqueeze(1)
    sentences = torch.arange(paths.size(0), device=paths.device)[:, None, None]
    heads = torch.arange(cache[0][0].size(1), device=paths.device)[:, None]
    batch_size, num_slots = paths.size(0), num_needed + max(8 * num_new, num_needed)
    larger: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for keys, values, memory_keys, memory_values in cache:
        new_keys = keys.new_empty([batch_size, keys.size(1), num_slots, keys.size(3)])
        new_values = values.new_empty([batch_size, values.size(1), num_slots, values.size(3)])
        for old, new in ((keys, new_keys), (values, new_values)):
            new[:, :, :num_needed] = old[sentences, heads, places]
        larger.append((new_keys, new_values, memory_keys, memory_values))
    kept = paths.gather(2, places.expand(-1, paths.size(1), -1))
    return larger, torch.cat([kept, paths[:, :, used_slots:]], 2)


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """Return a view of shape [B, H, T, K] of x [B, T, H * K]."""
    return x.view(x.size(0), x.size(1), num_heads, x.size(2) // num_heads).transpose(1, 2)


class SelfAttention(nn.Module):
    """Self-attention. One matrix product computes queries, keys and values."""

    def __init__(self, settings: NetworkSettings) -> None:
        super().__init__()
        d_model, num_heads, d_k, d_v = settings.d_model, settings.num_heads, settings.key_size, settings.value_size
        self.num_heads, self.d_k, self.d_v = num_heads, d_k, d_v
        self.dropout = settings.attention_dropout
        self.query_key_value = nn.Linear(d_model, num_heads * (2 * d_k + d_v))
        self.output = nn.Linear(num_heads * d_v, d_model)
        # Initialize each projection by itself. Xavier's bound for the fused matrix would be smaller.
        for part in self.query_key_value.weight.split([num_heads * d_k, num_heads * d_k, num_heads * d_v]):
            nn.init.xavier_uniform_(part)
        nn.init.xavier_uniform_(self.output.weight)
        nn.init.zeros_(self.query_key_value.bias)
        nn.init.zeros_(self.output.bias)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project x [B, T, D] to queries and keys [B, H, T, K] and values [B, H, T, V]."""
        keys_size = self.num_heads * self.d_k
        query, key, value = self.query_key_value(x).split([keys_size, keys_size, self.num_heads * self.d_v], -1)
        heads = self.num_heads
        return split_heads(query, heads), split_heads(key, heads), split_heads(value, heads)

    def forward(self, x: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        """Map [B, T, D] to [B, T, D]. `mask` must be None if `is_causal`."""
        query, key, value = self.project(x)
        heads = attention(query, key, value, mask, is_causal, self.dropout if self.training else 0.0)
        return self.output(heads.transpose(1, 2).flatten(2))

    @torch.jit.unused
    def packed(self, x: Tensor, segments: Segments) -> Tensor:
        """Map rows [R, D] of a packed micro-batch to [R, D]."""
        projected = cast_linear(self.query_key_value, x)
        dropout = self.dropout if self.training else 0.0
        return cast_linear(self.output, self_attention(projected, segments, self.num_heads, self.d_k, dropout))

    def step(self, x: Tensor, keys: Tensor, values: Tensor, start: int, bias: Tensor | None) -> Tensor:
        """Process the next position of N hypotheses per sentence.

        Args:
            x: [B, N, D].
            keys: the cache [B, H, slots, K]. Slots start to start + N - 1 are written in place.
            values: the cache [B, H, slots, V], written in the same way.
            start: number of slots in use.
            bias: [B, 1, N, start + N], 0 at the slots on each hypothesis's path and -inf elsewhere; or None.

        Returns:
            [B, N, D].
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
        """Return the attention weights [B, H, T, T] of `forward` for the same inputs."""
        query, key, _ = self.project(x)
        return attention_weights(query, key, mask, is_causal)


class CrossAttention(nn.Module):
    """Attention of the decoder over the encoder's output."""

    def __init__(self, settings: NetworkSettings) -> None:
        super().__init__()
        d_model, num_heads, d_k, d_v = settings.d_model, settings.num_heads, settings.key_size, settings.value_size
        self.num_heads, self.d_k, self.d_v = num_heads, d_k, d_v
        self.dropout = settings.attention_dropout
        self.query = nn.Linear(d_model, num_heads * d_k)
        self.key_value = nn.Linear(d_model, num_heads * (d_k + d_v))
        self.output = nn.Linear(num_heads * d_v, d_model)
        nn.init.xavier_uniform_(self.query.weight)
        for part in self.key_value.weight.split([num_heads * d_k, num_heads * d_v]):
            nn.init.xavier_uniform_(part)
        nn.init.xavier_uniform_(self.output.weight)
        for linear in (self.query, self.key_value, self.output):
            nn.init.zeros_(linear.bias)

    def keys_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Project memory [B, S, D] to keys [B, H, S, K] and values [B, H, S, V]. Decoding does so once per sentence."""
        key, value = self.key_value(memory).split([self.num_heads * self.d_k, self.num_heads * self.d_v], -1)
        return split_heads(key, self.num_heads), split_heads(value, self.num_heads)

    def attend(self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Map x [B, T, D] to [B, T, D] by attention over the given keys and values."""
        query = split_heads(self.query(x), self.num_heads)
        heads = attention(query, keys, values, mask, False, self.dropout if self.training else 0.0)
        return self.output(heads.transpose(1, 2).flatten(2))

    def step(self, x: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
        """Map [B, N, D] to [B, N, D] for N hypotheses per sentence in a decoding step; bias is [B, 1, 1, S]."""
        query = split_heads(self.query(x), self.num_heads)
        heads = attention_step(query, keys, values, bias)
        return self.output(heads.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        """Map x [B, T, D] to [B, T, D] by attention over memory [B, S, D]."""
        keys, values = self.keys_values(memory)
        return self.attend(x, keys, values, mask)

    @torch.jit.unused
    def packed(self, x: Tensor, memory: Tensor, segments: Segments) -> Tensor:
        """Map rows x [M, D] of a packed micro-batch to [M, D] by attention over the rows of memory [R, D]."""
        query, key_value = cast_linear(self.query, x), cast_linear(self.key_value, memory)
        dropout = self.dropout if self.training else 0.0
        return cast_linear(self.output, cross_attention(query, key_value, segments, self.num_heads, self.d_k, dropout))

    @torch.jit.unused
    def weights(self, x: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        """Return the attention weights [B, H, T, S] of `forward` for the same inputs."""
        query = split_heads(self.query(x), self.num_heads)
        return attention_weights(query, self.keys_values(memory)[0], mask, False)
