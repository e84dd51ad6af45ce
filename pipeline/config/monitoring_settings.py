"""The recipe's `monitoring:` section: what is looked at more closely at each validation."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MonitoringSettings:
    """Sentences, layers and heads are counted from 0."""

    attention_sentences: list[int] | None = None
    """Validation pairs whose attention is drawn; if null, two of those that are always shown."""
    attention_layers: list[int] | None = None
    """The first and the last if null."""
    attention_heads: list[int] | None = None
    """The first eight at most if null."""
    embedding_pieces: int = 2000
    """So many of the most frequent pieces are points in the projector."""

    def __post_init__(self) -> None:
        for name in ("attention_sentences", "attention_layers", "attention_heads"):
            if any(index < 0 for index in getattr(self, name) or ()):
                raise ValueError(f"monitoring.{name} {getattr(self, name)} is not 0 or more")
        if self.embedding_pieces < 1:
            raise ValueError(f"monitoring.embedding_pieces {self.embedding_pieces} is not 1 or more")
