"""The recipe's sections that say what is trained and how: `network:` and `training:`.

These typed signatures are the recipe's schema; the defaults are the paper's base model.
"""

from dataclasses import dataclass

SHORTEST = 16
"""A sentence counts as this many tokens at least: what a search holds grows with its answers too."""


@dataclass(frozen=True)
class NetworkSettings:
    """What Table 3 of the paper varies, and pre-norm."""

    num_layers: int = 6
    """Encoder layers, and as many decoder layers (N)."""
    d_model: int = 512
    d_ff: int = 2048
    num_heads: int = 8
    d_k: int | None = None
    """Size of a head's keys; d_model / num_heads if null."""
    d_v: int | None = None
    """Size of a head's values; d_model / num_heads if null."""
    dropout: float = 0.1
    """On sub-layer outputs and on embeddings plus positions (section 5.4)."""
    learned_positions: bool = False
    max_positions: int = 512
    """How many positions are learned; sinusoidal ones have no end."""
    pre_norm: bool = False

    @property
    def key_size(self) -> int:
        """Of one head."""
        return self.d_model // self.num_heads if self.d_k is None else self.d_k

    @property
    def value_size(self) -> int:
        """Of one head."""
        return self.d_model // self.num_heads if self.d_v is None else self.d_v

    def __post_init__(self) -> None:
        for name in ("num_layers", "d_model", "d_ff", "num_heads", "max_positions"):
            if getattr(self, name) < 1:
                raise ValueError(f"network.{name} {getattr(self, name)} is not 1 or more")
        for name in ("d_k", "d_v"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"network.{name} {size} is not 1 or more")
        if (self.d_k is None or self.d_v is None) and self.d_model % self.num_heads:
            raise ValueError(
                f"network.d_model {self.d_model} is not a multiple of network.num_heads {self.num_heads}: "
                "change one, or give network.d_k and network.d_v"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"network.dropout {self.dropout} is not in [0, 1)")


@dataclass(frozen=True)
class TrainingSettings:
    """Loss, schedule and optimizer (sections 5.3 and 5.4)."""

    label_smoothing: float = 0.1
    warmup_steps: int = 4000
    learning_rate_factor: float = 1.0
    """Multiplies the whole schedule; 1 in the paper."""
    adam_beta1: float = 0.9
    adam_beta2: float = 0.98
    adam_epsilon: float = 1e-9
    gradient_clip_norm: float | None = None
    """Gradients are scaled down to this norm; the paper does not clip."""
    ema_decay: float | None = None
    """Validate and keep an exponential moving average of the weights, 0.999 say; the paper averages checkpoints."""

    def __post_init__(self) -> None:
        if self.ema_decay is not None and not 0.0 < self.ema_decay < 1.0:
            raise ValueError(f"training.ema_decay {self.ema_decay} is not between 0 and 1")
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ValueError(f"training.label_smoothing {self.label_smoothing} is not in [0, 1)")
        for name in ("adam_beta1", "adam_beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"training.{name} {getattr(self, name)} is not in [0, 1)")
        if self.learning_rate_factor < 0.0:
            raise ValueError(f"training.learning_rate_factor {self.learning_rate_factor} is not 0 or more")
        for name in ("adam_epsilon", "gradient_clip_norm"):
            value = getattr(self, name)
            if value is not None and value <= 0.0:
                raise ValueError(f"training.{name} {value} is not more than 0")
        if self.warmup_steps < 1:
            raise ValueError(f"training.warmup_steps {self.warmup_steps} is not 1 or more")


@dataclass(frozen=True)
class DecodingSettings:
    """Beam search (section 6.1)."""

    beam_size: int = 4
    length_penalty: float = 0.6
    """alpha in ((5 + length) / 6) ** alpha, Wu et al. 2016."""
    max_extra_tokens: int = 50
    """An output has at most the source's length and this many tokens more."""

    def __post_init__(self) -> None:
        if self.beam_size < 1:
            raise ValueError(f"decoding.beam_size {self.beam_size} is not 1 or more")
        if self.length_penalty < 0.0:
            raise ValueError(f"decoding.length_penalty {self.length_penalty} is not 0 or more")
        if self.max_extra_tokens < 0:
            raise ValueError(f"decoding.max_extra_tokens {self.max_extra_tokens} is not 0 or more")
