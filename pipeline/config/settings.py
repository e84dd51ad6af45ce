"""The recipe's `run:`, `monitoring:` and `trainer:` sections."""

import re
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal, get_args

from data_module.errors import InputError
from data_module.registry import LARGEST, check_range
from data_module.system.files import PathText, PlainValues

LIKELIHOOD = "likelihood"
"""The value of `run.best_by` that is no metric of translations."""


def validation_tag(best_by: str) -> str:
    """Return the curve that a value of `run.best_by` names."""
    return "validation/" + ("negative_log_likelihood" if best_by == LIKELIHOOD else best_by)


@dataclass(frozen=True)
class RunSettings:
    """Where a run is written, what it keeps, when it stops early."""

    folder: PathText | None = None
    """Folder that `fit` writes the run to. If null, `runs/<recipe's name>`."""
    seed: int = 1
    """Seed of initial weights, dropout and the order of training data."""
    checkpoint_every_steps: int | None = 1000
    """Optimizer steps between checkpoints; null to save by time only."""
    checkpoint_every_minutes: float | None = None
    """Time between checkpoints, checked every `log_every_steps` steps; in addition to `checkpoint_every_steps`."""
    keep_last: int = 5
    """Number of newest checkpoints kept, and of checkpoints around the best validation; the best one is kept too."""
    best_by: str = "bleu"
    """What chooses `best.ckpt`, and what `patience` and `average --best` follow: `likelihood`, or a metric: `bleu`,
    `chrf`, `exact_match`, `ter`, `chrf2++` or a registered one."""
    validation_translations: int | None = None
    """Number of validation sentences to translate, evenly spread over the text; all of them if null. 0 needs `best_by`
    likelihood."""
    metrics: list[Literal["ter", "chrf2++"]] = field(default_factory=list)
    """Further metrics of validation and `evaluate`."""
    patience: int | None = None
    """Stop after this many validations without a better score of `best_by`. If null, never."""
    bleu_tokenizer: Literal["13a", "intl", "char", "zh", "ja-mecab", "ko-mecab"] | None = None
    """sacreBLEU's tokenizer. If null, that of `corpus.target_language`."""
    log_every_steps: int = 50
    """Optimizer steps between logged points of training metrics."""
    compile: bool | None = None
    """Train with torch.compile. If null, where this is possible: on a GPU, but not with plain attention."""
    kernels: Literal["pytorch"] | None = None
    """Kernels of attention and of validation's search. If null, a CPU takes the project's C++ programs, where they can
    run. `pytorch`: PyTorch's everywhere."""
    timeout_seconds: int = 600
    """How long a rank waits for another one before it ends with an error that names it."""

    def __post_init__(self) -> None:
        positive = "keep_last", "log_every_steps", "checkpoint_every_steps", "patience"
        check_range(self, "run", "1 or more", lambda count: count >= 1, *positive)
        check_range(self, "run", "from 1 to 1,000,000,000", lambda count: 1 <= count <= 10**9, "timeout_seconds")
        check_range(self, "run", "more than 0", lambda minutes: minutes > 0, "checkpoint_every_minutes")
        check_range(self, "run", "0 or more", lambda count: count >= 0, "validation_translations")
        # PyTorch's generators take no more.
        check_range(self, "run", "0 or more and less than 2 ** 63", lambda seed: 0 <= seed < 1 << 63, "seed")
        if self.validation_translations == 0 and self.best_by != LIKELIHOOD:
            raise ValueError(
                f"run.best_by {self.best_by} is a score of translations, and run.validation_translations 0 makes none; "
                f"give run.best_by {LIKELIHOOD}, or another number"
            )
        if self.checkpoint_every_steps is None and self.checkpoint_every_minutes is None:
            raise ValueError("run: give checkpoint_every_steps or checkpoint_every_minutes")


BLEU_TOKENIZERS: tuple[str, ...] = get_args(get_args(RunSettings.__annotations__["bleu_tokenizer"])[0])


@dataclass(frozen=True)
class MonitoringSettings:
    """What attention plots and the projector show."""

    attention_sentences: list[int] | None = None
    """Validation pairs, from 0 on, whose attention is plotted; none if empty, two of the displayed samples if null."""
    embedding_pieces: int = 2000
    """Number of the most frequent pieces shown in the projector."""

    def __post_init__(self) -> None:
        check_range(self, "monitoring", "0 or more", lambda values: min(values, default=0) >= 0, "attention_sentences")
        check_range(self, "monitoring", "1 or more", lambda count: count >= 1, "embedding_pieces")


RESERVED_KEYS = {
    "callbacks": "the pipeline has its own",
    "logger": "TensorBoard is always written",
    "plugins": "the pipeline has its own",
    "max_epochs": "count in steps with trainer.max_steps",
    "min_epochs": "count in steps with trainer.min_steps",
    "check_val_every_n_epoch": "count in steps with trainer.val_check_interval",
    "accumulate_grad_batches": "batches.max_tokens_per_device sets the accumulation",
    "gradient_clip_val": "use training.gradient_clip_norm",
    "gradient_clip_algorithm": "use training.gradient_clip_norm",
    "log_every_n_steps": "use run.log_every_steps",
    "default_root_dir": "use run.folder",
    "enable_checkpointing": "checkpoints are always written",
    "limit_train_batches": "use trainer.max_steps",
    "limit_val_batches": "give a smaller validation text",
    "overfit_batches": "give a small corpus",
    "fast_dev_run": "use trainer.max_steps",
}
"""Keys of Lightning's Trainer that a recipe may not have, with what to use instead."""
TRAINER_KEYS: dict[str, object] = {
    "accelerator": Literal["auto", "cpu", "gpu", "cuda"],
    "strategy": Literal["auto", "ddp"],
    "devices": list[int] | str | int,
    "num_nodes": int,
    "precision": Literal["bf16-mixed", "16-mixed", "32-true", "64-true", 32, 64] | None,
    "max_steps": int,
    "min_steps": int | None,
    "max_time": str | None,
    "val_check_interval": int,
    "deterministic": bool | Literal["warn"] | None,
    "inference_mode": bool,
    "profiler": Literal["simple", "advanced", "pytorch"] | None,
    "detect_anomaly": bool,
}
"""The keys of Lightning's Trainer that a recipe may have, with the types or values that this program supports.

They are listed here because importing Lightning takes seconds, and mistakes are reported before that.
"""


def validate_trainer_keys(options: PlainValues) -> None:
    """Raise InputError for values of a recipe's `trainer:` that are out of range, and without `max_steps`."""
    if "max_steps" not in options:
        raise InputError("trainer.max_steps is missing; give the number of optimizer steps")
    for key, least in (("max_steps", 1), ("val_check_interval", 1), ("min_steps", 0)):
        steps = options.get(key)  # -1 means "without end" to Lightning; a run has a last step.
        if steps is not None and not least <= steps <= LARGEST:
            raise InputError(f"trainer.{key} {steps} is not a number of steps; give {least} or more, up to {LARGEST:,}")
    max_seconds(options.get("max_time"))


def max_seconds(max_time: str | None) -> float | None:
    """Return a recipe's `trainer.max_time` in seconds, None if it has none.

    Lightning's own limit would end the run as if it had finished, and synchronize all ranks in each step.

    Raises InputError for a value that is not a duration.
    """
    if max_time is None:
        return None
    parts = re.fullmatch(r"(\d{1,6}):(\d\d):(\d\d):(\d\d)", max_time.strip())
    if parts is None:
        raise InputError(
            f"trainer.max_time {max_time} is not a duration; give days:hours:minutes:seconds, as in 00:00:45:00"
        )
    days, hours, minutes, seconds = map(int, parts.groups())
    return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds).total_seconds()
