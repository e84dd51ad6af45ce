"""The recipe's `run:` and `monitoring:` sections."""

from dataclasses import dataclass
from typing import Literal

from data_module.files import PathText


@dataclass(frozen=True)
class RunSettings:
    """Where a run is written, what it keeps, when it stops early."""

    folder: PathText | None = None
    """`runs/<recipe's name>` if null."""
    seed: int = 1
    """Seed of initial weights, dropout and the order of training data. It may not change on resume."""
    checkpoint_every_steps: int | None = 1000
    """Optimizer steps between checkpoints; null to save by time only."""
    checkpoint_every_minutes: float | None = None
    """Time between checkpoints, checked every `log_every_steps` steps; in addition to `checkpoint_every_steps`."""
    keep_last: int = 5
    """Number of newest checkpoints kept, and of checkpoints around the best validation; the best one is kept too."""
    patience: int | None = None
    """Stop after this many validations without a better BLEU; never if null."""
    bleu_tokenizer: Literal["13a", "intl", "char", "zh", "ja-mecab", "ko-mecab"] | None = None
    """sacreBLEU's tokenizer; by `corpus.target_language` if null. A resumed run keeps the one it began with."""
    log_every_steps: int = 50
    """Optimizer steps between logged points of training metrics."""
    compile: bool | None = None
    """Train with torch.compile; if null, on a GPU only. The first start then takes a few minutes."""
    kernels: Literal["triton", "pytorch"] | None = None
    """Kernels of attention and the loss. If null, the project's own where they can run: those in Triton on a GPU, and
    the loss in C++ on a CPU. Else PyTorch's."""
    timeout_seconds: int = 600
    """How long a rank waits for another one before it ends with an error that names it."""

    def __post_init__(self) -> None:
        for name in ("keep_last", "log_every_steps", "timeout_seconds", "checkpoint_every_steps", "patience"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"run.{name} {value} is not 1 or more")
        if self.checkpoint_every_minutes is not None and self.checkpoint_every_minutes <= 0:
            raise ValueError(f"run.checkpoint_every_minutes {self.checkpoint_every_minutes} is not more than 0")
        if self.seed < 0:
            raise ValueError(f"run.seed {self.seed} is not 0 or more")
        if self.checkpoint_every_steps is None and self.checkpoint_every_minutes is None:
            raise ValueError("run: give checkpoint_every_steps or checkpoint_every_minutes")


@dataclass(frozen=True)
class MonitoringSettings:
    """What attention plots and the projector show. Sentences, layers and heads are counted from 0."""

    attention_sentences: list[int] | None = None
    """Validation pairs, from 0 on, whose attention is plotted; none if empty, two of the displayed samples if null."""
    attention_layers: list[int] | None = None
    """Layers, from 0 on, whose attention is plotted if there are such; the first and last of each stack if null."""
    attention_heads: list[int] | None = None
    """Heads, from 0 on, whose attention is plotted; the first eight if null."""
    embedding_pieces: int = 2000
    """Number of the most frequent pieces shown in the projector."""

    def __post_init__(self) -> None:
        for name in ("attention_sentences", "attention_layers", "attention_heads"):
            if any(index < 0 for index in getattr(self, name) or ()):
                raise ValueError(f"monitoring.{name} {getattr(self, name)} is not 0 or more")
        if self.embedding_pieces < 1:
            raise ValueError(f"monitoring.embedding_pieces {self.embedding_pieces} is not 1 or more")
