"""Encoder and decoder layers (section 3.1), with the feed-forward network of section 3.3.

Post-norm as in the paper, LayerNorm(x + Dropout(Sublayer(x))); with `pre_norm`, x + Dropout(Sublayer(LayerNorm(x))).
"""

import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import CrossAttention, SelfAttention
from model.cpu.dropout import Dropout
from model.cpu.linear import Linear
from model.settings import NetworkSettings


class FeedForward(nn.Module):
    """max(0, x W1 + b1) W2 + b2 (equation 2)."""

    def __init__(self, settings: NetworkSettings) -> None:
        super().__init__()
        self.inner = Linear(settings.d_model, settings.d_ff)
        self.outer = Linear(settings.d_ff, settings.d_model)
        for linear in (self.inner, self.outer):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return self.outer(F.relu(self.inner(x)))


class Residual(nn.Module):
    """What stands around every sub-layer: dropout, addition, normalization.

    A layer calls `before`, its sub-layer, then `after`.
    """

    def __init__(self, settings: NetworkSettings) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(settings.d_model)
        self.dropout = Dropout(settings.dropout)
        self.pre_norm = settings.pre_norm

    def before(self, x: Tensor) -> Tensor:
        """The sub-layer's input."""
        return self.norm(x) if self.pre_norm else x

    def forward(self, x: Tensor, sublayer_output: Tensor) -> Tensor:
        """The next sub-layer's x."""
        total = x + self.dropout(sublayer_output)
        return total if self.pre_norm else self.norm(total)


class EncoderLayer(nn.Module):
    """Self-attention, then the feed-forward network."""

    def __init__(self, settings: NetworkSettings) -> None:
        super().__init__()
        self.self_attention = SelfAttention(settings)
        self.feed_forward = FeedForward(settings)
        self.self_attention_residual = Residual(settings)
        self.feed_forward_residual = Residual(settings)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """[B, S, D] -> [B, S, D]; mask [B, 1, 1, S] or None where no position is padding."""
        residual = self.self_attention_residual
        x = residual(x, self.self_attention(residual.before(x), mask, False))
        residual = self.feed_forward_residual
        return residual(x, self.feed_forward(residual.before(x)))


class DecoderLayer(nn.Module):
    """Causal self-attention, attention over the encoder's output, then the feed-forward network."""

    def __init__(self, settings: NetworkSettings) -> None:
        super().__init__()
        self.self_attention = SelfAttention(settings)
        self.cross_attention = CrossAttention(settings)
        self.feed_forward = FeedForward(settings)
        self.self_attention_residual = Residual(settings)
        self.cross_attention_residual = Residual(settings)
        self.feed_forward_residual = Residual(settings)

    def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor | None) -> Tensor:
        """[B, T, D] with memory [B, S, D] -> [B, T, D]. Padding on the right needs no mask: causality hides it."""
        residual = self.self_attention_residual
        x = residual(x, self.self_attention(residual.before(x), None, True))
        residual = self.cross_attention_residual
        x = residual(x, self.cross_attention(residual.before(x), memory, memory_mask))
        residual = self.feed_forward_residual
        return residual(x, self.feed_forward(residual.before(x)))

    def step(
        self,
        x: Tensor,
        start: int,
        cache: tuple[Tensor, Tensor, Tensor, Tensor],
        memory_bias: Tensor | None,
        path_bias: Tensor | None,
    ) -> Tensor:
        """One more position of N hypotheses a sentence, [B, N, D] -> [B, N, D]; see `Transformer.decode_step`."""
        residual = self.self_attention_residual
        x = residual(x, self.self_attention.step(residual.before(x), cache[0], cache[1], start, path_bias))
        residual = self.cross_attention_residual
        x = residual(x, self.cross_attention.step(residual.before(x), cache[2], cache[3], memory_bias))
        residual = self.feed_forward_residual
        return residual(x, self.feed_forward(residual.before(x)))
