"""The recipe's sections `network:`, `training:` and `decoding:`.

These dataclasses are the recipe's schema. Their defaults are the paper's base model.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from data_module.registry import check_range

DECAY_TO_LAST_STEP = {"linear", "cosine"}
"""Schedules that depend on `trainer.max_steps`, which therefore must stay as it is when a run is resumed."""
STOP_RULES = ("exact", "first")


@dataclass(frozen=True)
class NetworkSettings:
    """The recipe's `network:` section: what Table 3 of the paper varies, and the kind of norm and activation."""

    num_layers: int = 6
    """Number of encoder layers and of decoder layers (N)."""
    num_encoder_layers: int | None = None
    """Number of encoder layers. If null, `num_layers`."""
    num_decoder_layers: int | None = None
    """Number of decoder layers. If null, `num_layers`."""
    d_model: int = 512
    """Width of embeddings and layers."""
    d_ff: int = 2048
    """Width of the inner layer of the feed-forward networks (section 3.3)."""
    num_heads: int = 8
    """Number of attention heads (h)."""
    d_k: int | None = None
    """Size of a head's keys. If null, d_model / num_heads."""
    d_v: int | None = None
    """Size of a head's values. If null, d_model / num_heads."""
    dropout: float = 0.1
    """Dropout of sub-layer outputs and of the sums of embeddings and positions (section 5.4)."""
    attention_dropout: float = 0.0
    """Dropout of attention weights."""
    activation_dropout: float = 0.0
    """Dropout of the activations inside the feed-forward networks."""
    learned_positions: bool = False
    """Learn a table of positions instead of adding sinusoids (Table 3, row E)."""
    max_positions: int = 512
    """Number of learned positions. Sinusoidal ones are unlimited."""
    pre_norm: bool = False
    """Normalize the input of each sub-layer, not the output of each residual connection."""
    norm: str = "layer_norm"
    """`layer_norm`, or a name registered in `model.layers.NORMS`."""
    activation: str = "relu"
    """`relu`, `swish`, or a name registered in `model.layers.ACTIVATIONS`, for the feed-forward networks."""
    self_attention: str = "dot_product"
    """`dot_product` (section 3.2.1), or a name registered in `model.layers.SELF_ATTENTIONS`."""
    output_bias: bool = False
    """Add a bias to the logits."""

    @property
    def encoder_layers(self) -> int:
        """Number of encoder layers."""
        return self.num_layers if self.num_encoder_layers is None else self.num_encoder_layers

    @property
    def decoder_layers(self) -> int:
        """Number of decoder layers."""
        return self.num_layers if self.num_decoder_layers is None else self.num_decoder_layers

    @property
    def key_size(self) -> int:
        """Size of a head's keys."""
        return self.d_model // self.num_heads if self.d_k is None else self.d_k

    @property
    def value_size(self) -> int:
        """Size of a head's values."""
        return self.d_model // self.num_heads if self.d_v is None else self.d_v

    def __post_init__(self) -> None:
        sizes, largest = ("d_model", "d_ff", "num_heads", "d_k", "d_v"), 10**6  # Products of three fit into 64 bits.
        check_range(self, "network", f"{largest:,} or less", lambda size: size <= largest, *sizes)
        check_range(self, "network", "10,000 or less", lambda depth: depth <= 10_000, *_DEPTH_KEYS)
        check_range(self, "network", "1 or more", lambda size: size >= 1, *sizes, "max_positions", *_DEPTH_KEYS)
        dropouts = "dropout", "attention_dropout", "activation_dropout"
        check_range(self, "network", "in [0, 1)", lambda p: 0.0 <= p < 1.0, *dropouts)
        if (self.d_k is None or self.d_v is None) and self.d_model % self.num_heads:
            raise ValueError(
                f"network.d_model {self.d_model} is not a multiple of network.num_heads {self.num_heads}: "
                "change one, or give network.d_k and network.d_v"
            )


def changed_keys(first: Mapping[str, object], second: Mapping[str, object]) -> list[str]:
    """Return the keys in which two networks differ.

    If both have the same depths, the keys of depths do not differ: 12 encoder and 2 decoder layers may be written with
    `num_layers` 12, 6 or 2. Fields of `NetworkSettings` that an earlier version did not have are at their defaults.
    """
    first, second = with_defaults(first), with_defaults(second)
    changed = [key for key in {**second, **first} if first.get(key) != second.get(key)]
    return [key for key in changed if key not in _DEPTH_KEYS or _depths(first) != _depths(second)]


def with_defaults(network: Mapping[str, object]) -> dict[str, Any]:
    """Return the values of fields of `NetworkSettings` completed with defaults."""
    return {**asdict(NetworkSettings()), **network}


_DEPTH_KEYS = ("num_layers", "num_encoder_layers", "num_decoder_layers")


def _depths(network: Mapping[str, object]) -> list[object]:
    return [network["num_layers"] if network[key] is None else network[key] for key in _DEPTH_KEYS[1:]]


@dataclass(frozen=True)
class TrainingSettings:
    """The recipe's `training:` section: loss, schedule and optimizer (sections 5.3 and 5.4)."""

    label_smoothing: float = 0.1
    """Probability that label smoothing spreads evenly over all pieces (section 5.4)."""
    r_drop_alpha: float = 0.0
    """Weight of R-Drop's divergence between two passes (Liang et al. 2021); 0: a single pass."""
    schedule: str = "paper"
    """`paper`, `inverse_sqrt`, `linear`, `cosine`, or a name registered in `model.optimization.SCHEDULES`."""
    peak_learning_rate: float | None = None
    """Learning rate at the end of the warm-up, of schedules other than `paper`."""
    warmup_steps: int = 4000
    """Number of steps for which the learning rate rises."""
    learning_rate_factor: float = 1.0
    """Factor on all learning rates."""
    optimizer: str = "adam"
    """`adam`, `muon`, or a name registered in `model.optimization.OPTIMIZERS`."""
    adam_beta1: float = 0.9
    """Decay of Adam's mean of gradients."""
    adam_beta2: float = 0.98
    """Decay of Adam's mean of squared gradients."""
    adam_epsilon: float = 1e-9
    """Added to the denominator of Adam's update."""
    muon_momentum: float | None = None
    """Decay of Muon's mean of gradients. If null, 0.95."""
    weight_decay: float = 0.0
    """Decoupled weight decay, as in AdamW, but not of biases and norms."""
    gradient_clip_norm: float | None = None
    """Maximum norm of the gradient. If null, gradients are not clipped."""
    ema_decay: float | None = None
    """Decay of an exponential moving average of the weights, such as 0.999. If null, there is none."""

    def __post_init__(self) -> None:
        shares = "label_smoothing", "adam_beta1", "adam_beta2", "muon_momentum"
        check_range(self, "training", "in [0, 1)", lambda share: 0.0 <= share < 1.0, *shares)
        check_range(self, "training", "between 0 and 1", lambda decay: 0.0 < decay < 1.0, "ema_decay")
        check_range(self, "training", "1 or more", lambda steps: steps >= 1, "warmup_steps")
        factors = "learning_rate_factor", "r_drop_alpha", "weight_decay"
        check_range(self, "training", "a finite number of 0 or more", lambda x: 0.0 <= x < math.inf, *factors)
        positive = "adam_epsilon", "gradient_clip_norm", "peak_learning_rate"
        check_range(self, "training", "a finite number above 0", lambda x: 0.0 < x < math.inf, *positive)
        if self.muon_momentum is not None and self.optimizer == "adam":
            raise ValueError("training.muon_momentum has no effect on training.optimizer adam; give adam_beta1")
        if self.schedule == "paper" and self.peak_learning_rate is not None:
            raise ValueError(
                "training.peak_learning_rate has no effect on training.schedule paper; choose inverse_sqrt, or give "
                "training.learning_rate_factor instead"
            )
        if self.schedule in ("inverse_sqrt", "linear", "cosine") and self.peak_learning_rate is None:
            raise ValueError(f"training.schedule {self.schedule} needs training.peak_learning_rate, such as 5e-4")


LARGEST_SEARCH = 1_000_000
"""Largest `beam_size` and `max_extra_tokens`: products of such sizes fit into 64 bits."""


@dataclass(frozen=True)
class DecodingSettings:
    """The recipe's `decoding:` section: beam search (section 6.1)."""

    beam_size: int = 4
    """Number of open hypotheses per sentence; 1 is greedy search."""
    length_penalty: float = 0.6
    """alpha in ((5 + length) / 6) ** alpha, Wu et al. 2016."""
    max_extra_tokens: int = 50
    """Maximum number of tokens by which a translation is longer than its source."""
    stop_rule: str = "exact"
    """When a search stops. `exact`: no open hypothesis can win; `first`: `beam_size` hypotheses have ended."""

    def __post_init__(self) -> None:
        if self.stop_rule not in STOP_RULES:
            raise ValueError(f"decoding.stop_rule {self.stop_rule} is not {' or '.join(STOP_RULES)}")
        largest = LARGEST_SEARCH
        check_range(self, "decoding", f"1 to {largest:,}", lambda size: 1 <= size <= largest, "beam_size")
        check_range(self, "decoding", f"0 to {largest:,}", lambda size: 0 <= size <= largest, "max_extra_tokens")
        rule = "a finite number of 0 or more"
        check_range(self, "decoding", rule, lambda alpha: 0.0 <= alpha < math.inf, "length_penalty")
