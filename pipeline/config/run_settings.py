"""The recipe's `run:` section."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RunSettings:
    """The recipe's `run:` section: where a run lies, what it keeps, when it stops early."""

    folder: str | None = None
    """`runs/<recipe's name>` if null."""
    seed: int = 1
    checkpoint_every_steps: int | None = 1000
    checkpoint_every_minutes: float | None = None
    """Looked at every `log_every_steps`."""
    keep_last: int = 5
    """Checkpoints kept, the newest ones; the best by validation BLEU is kept besides."""
    patience: int | None = None
    """Stop after this many validations without a better BLEU."""
    log_every_steps: int = 50
    compile: bool | None = None
    """Train through torch.compile; if null, on a GPU only. The first steps then take a few minutes."""
    timeout_seconds: int = 600
    """How long a rank waits for another before it gives up, names it, and ends."""

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
