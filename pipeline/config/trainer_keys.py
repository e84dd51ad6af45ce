"""Keys of Lightning's Trainer: which of them a recipe may set, and which values are accepted."""

import inspect
import typing
from typing import Any


def validate_trainer_keys(options: dict[str, Any]) -> None:
    """Raise InputError for values of a recipe's `trainer:` that Lightning accepts and this program does not."""
    from data_module.errors import InputError

    if "max_steps" not in options:
        raise InputError("trainer.max_steps is missing; give the number of optimizer steps")
    steps, every = options["max_steps"], options.get("val_check_interval", 1)
    precision, strategy = str(options.get("precision")), options.get("strategy", "auto")
    if steps < 1:  # -1 means "without end" to Lightning; a run has a last step.
        raise InputError(f"trainer.max_steps {steps} is not a number of steps; give 1 or more")
    if not isinstance(every, int) or every < 1:
        # A duration ends at another step on each rank, and epochs differ in their number of steps.
        raise InputError(f"trainer.val_check_interval {every} is not a number of steps; give 1 or more")
    if precision in ("16-true", "16", "bf16-true", "bf16"):
        raise InputError(f"trainer.precision {precision} is too coarse for Adam's updates; use 16-mixed or bf16-mixed")
    if strategy not in ("auto", "ddp"):
        raise InputError(f"trainer.strategy {strategy} is not supported; remove it, and DDP is used on several devices")


def max_seconds(max_time: Any) -> float | None:
    """Return a recipe's `trainer.max_time` in seconds, None if it has none.

    Lightning's own limit would end the run as if it had finished, and synchronize all ranks in each step.

    Raises InputError for a value that is not a duration.
    """
    from lightning.pytorch.callbacks import Timer
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    from data_module.errors import InputError

    try:
        return Timer(max_time).time_remaining()
    except (MisconfigurationException, TypeError):
        raise InputError(
            f"trainer.max_time {max_time} is not a duration; give days:hours:minutes:seconds, as in 00:00:45:00"
        ) from None


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
    "num_sanity_val_steps": "",
    "use_distributed_sampler": "",
    "reload_dataloaders_every_n_epochs": "",
    "enable_checkpointing": "",
    "enable_progress_bar": "",
    "enable_model_summary": "",
    "enable_autolog_hparams": "",
    "model_registry": "",
    "barebones": "",
    "limit_train_batches": "use trainer.max_steps",
    "limit_val_batches": "give a smaller validation text",
    "overfit_batches": "give a small corpus",
    "fast_dev_run": "use trainer.max_steps",
}
"""Keys of Lightning's Trainer that this program sets, with what to use instead."""


def trainer_signature() -> dict[str, Any]:
    """Return the keys that a recipe's `trainer:` may have, with their type annotations."""
    from lightning.pytorch import Trainer

    names = inspect.signature(Trainer.__init__).parameters
    hints = typing.get_type_hints(Trainer.__init__)
    return {name: hints[name] for name in names if name != "self" and name not in RESERVED_KEYS}
