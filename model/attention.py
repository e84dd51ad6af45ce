"""Multi-head attention (section 3.2).

Shapes: B sentences, T queries, S keys, D d_model, H heads, K d_k, V d_v; R source and M target tokens in packed rows.
`bias` is added to the scores and broadcasts to [B, H, T, S]: 0 where attention is allowed, -inf elsewhere; None allows
all. Unlike in the paper's formulas, the projections have biases, as in torch.nn.MultiheadAttention.

Training packs sentences into rows (`packed_attention.py`); validation, decoding and all exports have padded batches:

| method | called by | when |
| --- | --- | --- |
| `rows` of both classes | `Transformer.rows` | training: once for each micro-batch |
| `SelfAttention.forward` | `PaddedTransformer.encode` | once for each padded batch, in the encoder |
| `CrossAttention.keys_values` | `PaddedTransformer.init_cache` | once for each padded batch, before the decoder |
| `step` of both classes | `PaddedTransformer.step`, `forward` | for each position of a search, or once for a target |

All of them compute attention by `attend`; `rows` does so if there is no kernel for it.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.packed_attention import RowSentences, attend_in_groups
from model.settings import NetworkSettings


def attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout: float = 0.0) -> Tensor:
    """Compute softmax(Q K^T / sqrt(d_k) + bias) V (equation 1).

    Args:
        query: [B, H, T, K].
        key: [B, H, S, K].
        value: [B, H, S, V].
        bias: in the query's dtype, or None.
        dropout: probability of dropping a weight.

    Returns:
        [B, H, T, V].
    """
    if dropout > 0.0 or not _is_small(query):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout)
    scores = (query * (1.0 / math.sqrt(query.size(-1)))) @ key.transpose(-2, -1)
    if bias is not None:
        scores += bias
    return scores.softmax(-1) @ value


def _is_small(query: Tensor) -> bool:
    """Return whether plain products are faster than the fused kernel: for one query, twice as fast (torch 2.13).

    They are on a CPU, for more than 8 sentences of at most 32 queries. An exported program cannot decide by the number
    of sentences, which varies.
    """
    if torch.compiler.is_compiling():
        return isinstance(query.size(2), int) and query.size(2) <= 32
    return query.device.type == "cpu" and query.size(0) > 8 and query.size(2) <= 32


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """Return a view of shape [B, H, T, K] of x [B, T, H * K]."""
    return x.view(x.size(0), x.size(1), num_heads, x.size(2) // num_heads).transpose(1, 2)


def join_heads(heads: Tensor) -> Tensor:
    """Return [B, T, H * V] of heads [B, H, T, V]."""
    return heads.transpose(1, 2).flatten(2)


def append(cache: Tensor, new: Tensor, start: int) -> Tensor:
    """Write keys or values to a cache, in place if it has room.

    Args:
        cache: [B, H, slots, K]. The first `start` slots are in use.
        new: [B, H, N, K], for the next N slots.
        start: number of slots in use. If all slots are in use, the result is a new tensor: a decoding step is then a
            pure function, as torch.export and gradients require.

    Returns:
        The slots in use [B, H, start + N, K].
    """
    if start == cache.size(2):
        return torch.cat([cache, new], 2)
    cache.narrow(2, start, new.size(2)).copy_(new)
    return cache.narrow(2, 0, start + new.size(2))


def initialize_projections(linear: nn.Linear, *sizes: int) -> None:
    """Initialize a linear layer that computes several projections at once, with these numbers of outputs.

    The weight's attribute `projections`, which Muon reads, is set to these sizes.
    """
    # Each by itself, because Xavier's bound for the fused matrix would be smaller.
    for part in linear.weight.split(sizes):
        nn.init.xavier_uniform_(part)
    nn.init.zeros_(linear.bias)
    linear.weight.projections = sizes  # type: ignore[attr-defined]


class Attention(nn.Module):
    """What self-attention and cross-attention share."""

    def __init__(self, settings: NetworkSettings) -> None:
        super().__init__()
        self.num_heads, self.d_k, self.d_v = settings.num_heads, settings.key_size, settings.value_size
        self.dropout = settings.attention_dropout

    def attend(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        """Compute `attention` with the recipe's dropout. `attention_maps` replaces this method to record weights."""
        return attention(query, key, value, bias, self.dropout if self.training else 0.0)

    def attend_rows(self, inputs: list[Tensor], sentences: RowSentences) -> Tensor:
        """Compute attention over packed rows: by the backend's kernel or, without one, by `attend` over padded groups.

        `inputs` is one tensor of queries, keys and values [tokens, H * (2 K + V)], or two: queries [queries, H * K],
        and keys and values [keys, H * (K + V)]. The result is [queries, H * V].
        """
        if sentences.kernel is None:
            return attend_in_groups(self.attend, inputs, sentences, self.num_heads, self.d_k)
        dropout = self.dropout if self.training else 0.0
        return sentences.kernel(inputs, sentences, self.num_heads, self.d_k, dropout)


class SelfAttention(Attention):
    """Self-attention. One matrix product computes queries, keys and values."""

    def __init__(self, settings: NetworkSettings) -> None:
        super().__init__(settings)
        d_model, num_heads, d_k, d_v = settings.d_model, self.num_heads, self.d_k, self.d_v
        self.query_key_value = nn.Linear(d_model, num_heads * (2 * d_k + d_v))
        self.output = nn.Linear(num_heads * d_v, d_model)
        initialize_projections(self.query_key_value, num_heads * d_k, num_heads * d_k, num_heads * d_v)
        initialize_projections(self.output, d_model)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project x [B, T, D] to queries and keys [B, H, T, K] and values [B, H, T, V]."""
        keys_size = self.num_heads * self.d_k
        query, key, value = self.query_key_value(x).split([keys_size, keys_size, self.num_heads * self.d_v], -1)
        heads = self.num_heads
        return split_heads(query, heads), split_heads(key, heads), split_heads(value, heads)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Map a padded batch [B, T, D] to [B, T, D], in the encoder; bias is [B, 1, 1, T]."""
        query, key, value = self.project(x)
        return self.output(join_heads(self.attend(query, key, value, bias)))

    def step(
        self, x: Tensor, keys: Tensor, values: Tensor, start: int, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Process N tokens per sentence in the decoder: those of N hypotheses, or N positions of one target.

        Args:
            x: [B, N, D].
            keys: the cache [B, H, slots, K]; see `append`.
            values: the cache [B, H, slots, V].
            start: number of slots in use.
            bias: [B, 1, N, start + N], 0 at the slots on the path of each token (`decoding.py`), its own included. A
                path has one slot for each position, in the order of positions: its first slot has position 0. None if
                all slots are on all paths.

        Returns:
            [B, N, D], and the keys and values in use [B, H, start + N, K or V].
        """
        query, key, value = self.project(x)
        keys, values = append(keys, key, start), append(values, value, start)
        return self.output(join_heads(self.attend(query, keys, values, bias))), keys, values

    def rows(self, x: Tensor, sentences: RowSentences) -> Tensor:
        """Map the tokens x [R, D] of packed rows to [R, D]."""
        return self.output(self.attend_rows([self.query_key_value(x)], sentences))


class CrossAttention(Attention):
    """Attention of the decoder over the encoder's output."""

    def __init__(self, settings: NetworkSettings) -> None:
        super().__init__(settings)
        d_model, num_heads, d_k, d_v = settings.d_model, self.num_heads, self.d_k, self.d_v
        self.query = nn.Linear(d_model, num_heads * d_k)
        self.key_value = nn.Linear(d_model, num_heads * (d_k + d_v))
        self.output = nn.Linear(num_heads * d_v, d_model)
        initialize_projections(self.query, num_heads * d_k)
        initialize_projections(self.key_value, num_heads * d_k, num_heads * d_v)
        initialize_projections(self.output, d_model)

    def keys_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Project memory [B, S, D] to keys [B, H, S, K] and values [B, H, S, V], once per sentence."""
        key, value = self.key_value(memory).split([self.num_heads * self.d_k, self.num_heads * self.d_v], -1)
        return split_heads(key, self.num_heads), split_heads(value, self.num_heads)

    def step(self, x: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
        """Map N tokens per sentence [B, N, D] to [B, N, D]; bias is [B, 1, 1, S]."""
        query = split_heads(self.query(x), self.num_heads)
        return self.output(join_heads(self.attend(query, keys, values, bias)))

    def rows(self, x: Tensor, memory: Tensor, sentences: RowSentences) -> Tensor:
        """Map the target tokens x [M, D] of packed rows to [M, D] by attention over the memory [R, D]."""
        return self.output(self.attend_rows([self.query(x), self.key_value(memory)], sentences))
