"""Encoder and decoder layers (section 3.1), with the feed-forward network of section 3.3.

The paper's layers are post-norm: Norm(x + Dropout(Sublayer(x))). With `network.pre_norm` they are
x + Dropout(Sublayer(Norm(x))).

Training calls `rows` of each layer, for packed rows. Padded batches go through `forward` of encoder layers and `step`
of decoder layers. Shapes are those of `attention.py`.
"""

from collections.abc import Callable

from torch import Tensor, nn

from data_module.registry import Registry
from model.attention import CrossAttention, SelfAttention, initialize_projections
from model.dropout import Dropout
from model.packed_attention import RowSentences
from model.settings import NetworkSettings

NORMS: Registry[Callable[[int], nn.Module]] = Registry("network.norm", layer_norm=nn.LayerNorm)
"""Functions that take d_model and return a module [..., D] -> [..., D], by the name that `network.norm` holds."""
ACTIVATIONS: Registry[Callable[[], nn.Module]] = Registry("network.activation", relu=nn.ReLU, swish=nn.SiLU)
"""Functions that return a module [..., D] -> [..., D], by the name that `network.activation` holds."""
SELF_ATTENTIONS: Registry[Callable[[NetworkSettings], SelfAttention]] = Registry(
    "network.self_attention", dot_product=SelfAttention
)
"""Subclasses of `SelfAttention`, by the name that `network.self_attention` holds."""


class FeedForward(nn.Module):
    """activation(x W1 + b1) W2 + b2; with ReLU, equation 2. `network.activation_dropout` applies before W2."""

    def __init__(self, settings: NetworkSettings) -> None:
        super().__init__()
        self.inner = nn.Linear(settings.d_model, settings.d_ff)
        self.outer = nn.Linear(settings.d_ff, settings.d_model)
        self.activation = ACTIVATIONS[settings.activation]()
        self.dropout = Dropout(settings.activation_dropout)
        for linear in (self.inner, self.outer):
            initialize_projections(linear, linear.out_features)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., D] to [..., D]."""
        return self.outer(self.dropout(self.activation(self.inner(x))))


class Residual(nn.Module):
    """The residual connection around a sub-layer: dropout, addition and normalization.

    A layer computes `residual(x, sublayer(residual.sublayer_input(x)))`.
    """

    def __init__(self, settings: NetworkSettings) -> None:
        super().__init__()
        self.norm = NORMS[settings.norm](settings.d_model)
        self.dropout = Dropout(settings.dropout)
        self.pre_norm = settings.pre_norm

    def sublayer_input(self, x: Tensor) -> Tensor:
        """Return the input of the sub-layer."""
        return self._normalized(x) if self.pre_norm else x

    def forward(self, x: Tensor, sublayer_output: Tensor) -> Tensor:
        """Return the output of the residual connection."""
        total = x + self.dropout(sublayer_output)
        return total if self.pre_norm else self._normalized(total)

    def _normalized(self, x: Tensor) -> Tensor:
        # On a GPU autocast leaves the results of norms in float32, which would double what is written to memory.
        return self.norm(x).to(x.dtype)


class EncoderLayer(nn.Module):
    """Self-attention, then the feed-forward network."""

    def __init__(self, settings: NetworkSettings) -> None:
        super().__init__()
        self.self_attention = SELF_ATTENTIONS[settings.self_attention](settings)
        self.feed_forward = FeedForward(settings)
        self.self_attention_residual = Residual(settings)
        self.feed_forward_residual = Residual(settings)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Map a padded batch [B, S, D] to [B, S, D]. `bias` [B, 1, 1, S] is -inf at padding; None if there is none."""
        residual = self.self_attention_residual
        x = residual(x, self.self_attention(residual.sublayer_input(x), bias))
        residual = self.feed_forward_residual
        return residual(x, self.feed_forward(residual.sublayer_input(x)))

    def rows(self, x: Tensor, sentences: RowSentences) -> Tensor:
        """Map the tokens x [R, D] of packed rows to [R, D]."""
        residual = self.self_attention_residual
        x = residual(x, self.self_attention.rows(residual.sublayer_input(x), sentences))
        residual = self.feed_forward_residual
        return residual(x, self.feed_forward(residual.sublayer_input(x)))


class DecoderLayer(nn.Module):
    """Causal self-attention, cross-attention, then the feed-forward network."""

    def __init__(self, settings: NetworkSettings) -> None:
        super().__init__()
        self.self_attention = SELF_ATTENTIONS[settings.self_attention](settings)
        self.cross_attention = CrossAttention(settings)
        self.feed_forward = FeedForward(settings)
        self.self_attention_residual = Residual(settings)
        self.cross_attention_residual = Residual(settings)
        self.feed_forward_residual = Residual(settings)

    def step(
        self,
        x: Tensor,
        start: int,
        cache: tuple[Tensor, Tensor, Tensor, Tensor],
        source_bias: Tensor | None,
        path_bias: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Process N tokens per sentence, [B, N, D]: those of N hypotheses, or N positions of one target.

        Args:
            x: [B, N, D].
            start: number of cache slots in use.
            cache: this layer's part of what `PaddedTransformer.init_cache` returns.
            source_bias: [B, 1, 1, S], -inf at the source's padding; None if there is none.
            path_bias: [B, 1, N, start + N], see `SelfAttention.step`.

        Returns:
            [B, N, D], and self-attention's keys and values in use [B, H, start + N, K or V].
        """
        residual = self.self_attention_residual
        attended, keys, values = self.self_attention.step(
            residual.sublayer_input(x), cache[0], cache[1], start, path_bias
        )
        x = residual(x, attended)
        residual = self.cross_attention_residual
        x = residual(x, self.cross_attention.step(residual.sublayer_input(x), cache[2], cache[3], source_bias))
        residual = self.feed_forward_residual
        return residual(x, self.feed_forward(residual.sublayer_input(x))), keys, values

    def rows(self, x: Tensor, memory: Tensor, decoder: RowSentences, cross: RowSentences) -> Tensor:
        """Map the target tokens x [M, D] of packed rows to [M, D], with the memory [R, D] of the source tokens."""
        residual = self.self_attention_residual
        x = residual(x, self.self_attention.rows(residual.sublayer_input(x), decoder))
        residual = self.cross_attention_residual
        x = residual(x, self.cross_attention.rows(residual.sublayer_input(x), memory, cross))
        residual = self.feed_forward_residual
        return residual(x, self.feed_forward(residual.sublayer_input(x)))
