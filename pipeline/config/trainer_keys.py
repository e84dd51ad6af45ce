"""Keys of Lightning's Trainer: which of them a recipe may set, and which values are accepted."""

import re
from datetime import timedelta
from typing import Any, Literal

CHOICES: dict[str, tuple[str | None, ...]] = {
    "accelerator": ("auto", "cpu", "gpu", "cuda"),
    "strategy": ("auto", "ddp"),
    "profiler": (None, "simple", "advanced", "pytorch"),
}
"""The values of some keys that are supported, of those that Lightning may know."""


def validate_trainer_keys(options: dict[str, Any]) -> None:
    """Raise InputError for values of a recipe's `trainer:` that Lightning accepts and this program does not."""
    from data_module.errors import InputError

    if "max_steps" not in options:
        raise InputError("trainer.max_steps is missing; give the number of optimizer steps")
    steps, every = options["max_steps"], options.get("val_check_interval", 1)
    precision = str(options.get("precision"))
    if steps < 1:  # -1 means "without end" to Lightning; a run has a last step.
        raise InputError(f"trainer.max_steps {steps} is not a number of steps; give 1 or more")
    if not isinstance(every, int) or every < 1:
        # A duration ends at another step on each rank, and epochs differ in their number of steps.
        raise InputError(f"trainer.val_check_interval {every} is not a number of steps; give 1 or more")
    if precision in ("16-true", "16", "bf16-true", "bf16"):
        raise InputError(f"trainer.precision {precision} is too coarse for Adam's updates; use 16-mixed or bf16-mixed")
    for key, choices in CHOICES.items():
        if (value := options.get(key, choices[0])) not in choices:
            several = ", and DDP is used on several devices" if key == "strategy" else ""
            names = ", ".join(map(str, filter(None, choices)))
            raise InputError(f"trainer.{key} {value} is not supported; remove it{several}, or give one of {names}")
    max_seconds(options.get("max_time"))


def max_seconds(max_time: Any) -> float | None:
    """Return a recipe's `trainer.max_time` in seconds, None if it has none.

    Lightning's own limit would end the run as if it had finished, and synchronize all ranks in each step.

    Raises InputError for a value that is not a duration.
    """
    from data_module.errors import InputError

    try:
        if isinstance(max_time, str) and (found := re.fullmatch(r"(\d+):(\d\d):(\d\d):(\d\d)", max_time.strip())):
            max_time = dict(zip(("days", "hours", "minutes", "seconds"), map(int, found.groups()), strict=True))
        if isinstance(max_time, dict):
            max_time = timedelta(**max_time)
    except (TypeError, OverflowError):
        pass
    if isinstance(max_time, timedelta):
        return max_time.total_seconds()
    if max_time is not None:
        raise InputError(
            f"trainer.max_time {max_time} is not a duration; give days:hours:minutes:seconds, as in 00:00:45:00"
        )
    return None


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


_SIGNATURE: dict[str, Any] = {
    "accelerator": str,
    "strategy": str,
    "devices": list[int] | str | int,
    "num_nodes": int,
    "precision": Literal[64, 32, 16]
    | Literal[
        "transformer-engine",
        "transformer-engine-float16",
        "16-true",
        "16-mixed",
        "bf16-true",
        "bf16-mixed",
        "32-true",
        "64-true",
    ]
    | Literal["64", "32", "16", "bf16"]
    | None,
    "max_steps": int,
    "min_steps": int | None,
    "max_time": str | timedelta | dict[str, int] | None,
    "limit_test_batches": int | float | None,
    "limit_predict_batches": int | float | None,
    "val_check_interval": int | float | str | timedelta | dict[str, int] | None,
    "deterministic": bool | Literal["warn"] | None,
    "benchmark": bool | None,
    "inference_mode": bool,
    "profiler": str | None,
    "detect_anomaly": bool,
    "sync_batchnorm": bool,
}
"""The other keys of Lightning's Trainer, without the classes that a recipe cannot contain.

They are written out because importing Lightning takes seconds, and a mistake is to be reported before that.
"""


def trainer_signature() -> dict[str, Any]:
    """Return the keys that a recipe's `trainer:` may have, with their type annotations."""
    return dict(_SIGNATURE)
