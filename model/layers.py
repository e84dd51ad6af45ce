"""Encoder and decoder layers (section 3.1), with the feed-forward network of section 3.3.

The paper's layers are post-norm: Norm(x + Dropout(Sublayer(x))). With `network.pre_norm` they are
x + Dropout(Sublayer(Norm(x))).
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from data_module.registry import Registry
from model.attention import CrossAttention, SelfAttention
from model.fast.cast_weights import cast_linear
from model.fast.dropout import Dropout
from model.packed_attention import Segments
from model.settings import NetworkSettings

NORMS: Registry[Callable[[int], nn.Module]] = Registry("network.norm", layer_norm=nn.LayerNorm)
"""Functions that take d_model and return a module [..., D] -> [..., D], by the name that `network.norm` holds."""
ACTIVATIONS: Registry[Callable[[], nn.Module]] = Registry("network.activation", relu=nn.ReLU, swish=nn.SiLU)
"""Functions that return a module [..., D] -> [..., D], by the name that `network.activation` holds."""


class FeedForward(nn.Module):
    """activation(x W1 + b1) W2 + b2; with ReLU, equation 2. `network.activation_dropout` applies before W2."""

    def __init__(self, settings: NetworkSettings) -> None:
        super().__init__()
        self.inner = nn.Linear(settings.d_model, settings.d_ff)
        self.outer = nn.Linear(settings.d_ff, settings.d_model)
        self.activation = ACTIVATIONS[settings.activation]()
        self.dropout = Dropout(settings.activation_dropout)
        for linear in (self.inner, self.outer):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., D] to [..., D]."""
        return self.outer(self.dropout(self.activation(self.inner(x))))

    @torch.jit.unused
    def packed(self, x: Tensor) -> Tensor:
        """Map rows [R, D] of a packed micro-batch to [R, D]."""
        return cast_linear(self.outer, self.dropout(self.activation(cast_linear(self.inner, x))))


class Residual(nn.Module):
    """The residual connection around a sub-layer: dropout, addition and normalization.

    A layer computes `residual(x, sublayer(residual.before(x)))`.
    """

    def __init__(self, settings: NetworkSettings) -> None:
        super().__init__()
        self.norm = NORMS[settings.norm](settings.d_model)
        self.dropout = Dropout(settings.dropout)
        self.pre_norm = settings.pre_norm

    def before(self, x: Tensor) -> Tensor:
        """Return the input of the sub-layer."""
        return self._normalized(x) if self.pre_norm else x

    def forward(self, x: Tensor, sublayer_output: Tensor) -> Tensor:
        """Return the output of the residual connection."""
        total = x + self.dropout(sublayer_output)
        return total if self.pre_norm else self._normalized(total)

    def _normalized(self, x: Tensor) -> Tensor:
        # On a GPU autocast computes norms in float32 and leaves the result so, which would double all that is written.
        return self.norm(x).to(x.dtype)


class EncoderLayer(nn.Module):
    """Self-attention, then the feed-forward network."""

    def __init__(self, settings: NetworkSettings) -> None:
        super().__init__()
        self.self_attention = SelfAttention(settings)
        self.feed_forward = FeedForward(settings)
        self.self_attention_residual = Residual(settings)
        self.feed_forward_residual = Residual(settings)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Map [B, S, D] to [B, S, D]. `mask` is [B, 1, 1, S], or None if no row is padded."""
        residual = self.self_attention_residual
        x = residual(x, self.self_attention(residual.before(x), mask, False))
        residual = self.feed_forward_residual
        return residual(x, self.feed_forward(residual.before(x)))

    @torch.jit.unused
    def packed(self, x: Tensor, segments: Segments) -> Tensor:
        """Map rows [R, D] of a packed micro-batch to [R, D]."""
        residual = self.self_attention_residual
        x = residual(x, self.self_attention.packed(residual.before(x), segments))
        residual = self.feed_forward_residual
        return residual(x, self.feed_forward.packed(residual.before(x)))


class DecoderLayer(nn.Module):
    """Causal self-attention, cross-attention, then the feed-forward network."""

    def __init__(self, settings: NetworkSettings) -> None:
        super().__init__()
        self.self_attention = SelfAttention(settings)
        self.cross_attention = CrossAttention(settings)
        self.feed_forward = FeedForward(settings)
        self.self_attention_residual = Residual(settings)
        self.cross_attention_residual = Residual(settings)
        self.feed_forward_residual = Residual(settings)

    def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor | None) -> Tensor:
        """Map x [B, T, D] to [B, T, D] with memory [B, S, D].

        Padding on the right of the target needs no mask, since causal attention hides it.
        """
        residual = self.self_attention_residual
        x = residual(x, self.self_attention(residual.before(x), None, True))
        residual = self.cross_attention_residual
        x = residual(x, self.cross_attention(residual.before(x), memory, memory_mask))
        residual = self.feed_forward_residual
        return residual(x, self.feed_forward(residual.before(x)))

    @torch.jit.unused
    def packed(self, x: Tensor, memory: Tensor, own: Segments, cross: Segments) -> Tensor:
        """Map rows x [M, D] of a packed micro-batch to [M, D], with memory [R, D]."""
        residual = self.self_attention_residual
        x = residual(x, self.self_attention.packed(residual.before(x), own))
        residual = self.cross_attention_residual
        x = residual(x, self.cross_attention.packed(residual.before(x), memory, cross))
        residual = self.feed_forward_residual
        return residual(x, self.feed_forward.packed(residual.before(x)))

    def step(
        self,
        x: Tensor,
        start: int,
        cache: tuple[Tensor, Tensor, Tensor, Tensor],
        memory_bias: Tensor | None,
        path_bias: Tensor | None,
    ) -> Tensor:
        """Map [B, N, D] to [B, N, D] for the next position of N hypotheses per sentence.

        `start` and `cache` are those of `Transformer.decode_step`, the latter of this layer. The biases are added to
        attention scores, 0 where attention is allowed and -inf elsewhere: `memory_bias` [B, 1, 1, S], `path_bias`
        [B, 1, N, start + N]; None where all of it is allowed.
        """
        residual = self.self_attention_residual
        x = residual(x, self.self_attention.step(residual.before(x), cache[0], cache[1], start, path_bias))
        residual = self.cross_attention_residual
        x = residual(x, self.cross_attention.step(residual.before(x), cache[2], cache[3], memory_bias))
        residual = self.feed_forward_residual
        return residual(x, self.feed_forward(residual.before(x)))
