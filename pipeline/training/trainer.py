"""Lightning's Trainer options: what a recipe may set, what this program and SLURM set."""

import inspect
import os
import shutil
import sys
import sysconfig
import typing
from datetime import timedelta
from pathlib import Path
from typing import Any

from pipeline.runtime.slurm import Step


def trainer_options(
    recipe_options: dict[str, Any], step: Step | None = None, timeout_seconds: int = 600
) -> dict[str, Any]:
    """A recipe's `trainer:` with what it leaves open decided: accelerator, precision, devices, strategy.

    Args:
        recipe_options: the recipe's section.
        step: the SLURM step this process is a task of; its nodes and tasks count, whatever the recipe says.
        timeout_seconds: how long a rank waits for another.

    Raises InputError for a GPU that is not there.
    """
    import torch

    from data_module.errors import InputError

    options = {"val_check_interval": 1000, "accelerator": "auto", **recipe_options}
    if missing := no_gpu(options["accelerator"]):
        raise InputError(missing)
    if options["accelerator"] == "auto" and not torch.cuda.is_available():
        options["accelerator"] = "cpu"
    options["precision"] = options.get("precision") or best_precision(options["accelerator"])
    if str(options["precision"]) in ("32-true", "32") and options["accelerator"] in ("auto", "gpu", "cuda"):
        allow_tf32()
    if step is not None:
        options |= {"num_nodes": step.num_nodes, "devices": step.tasks_per_node}
    options["strategy"] = strategy(options, timeout_seconds)
    return options


def refuse(options: dict[str, Any]) -> None:
    """Raises InputError for values of a recipe's `trainer:` that Lightning takes and that cannot be trained by."""
    from data_module.errors import InputError

    if "max_steps" not in options:
        raise InputError("trainer.max_steps is missing; give the number of optimizer steps")
    steps, every = options["max_steps"], options.get("val_check_interval", 1)
    precision, strategy = str(options.get("precision")), options.get("strategy", "auto")
    if steps < 1:  # to Lightning, -1 is without end: nothing would be the last step, to stop at or to go on to
        raise InputError(f"trainer.max_steps {steps} is not 1 or more")
    if not isinstance(every, int) or every < 1:
        # A duration is over at another step on each rank, and an epoch has no fixed number of steps.
        raise InputError(f"trainer.val_check_interval {every} is no number of steps, 1 or more")
    if precision in ("16-true", "16", "bf16-true", "bf16"):
        raise InputError(f"trainer.precision {precision} cannot hold Adam's steps; use 16-mixed, bf16-mixed")
    if strategy not in ("auto", "ddp"):
        raise InputError(f"trainer.strategy {strategy} is not for this program, which trains by ddp; leave it out")


def no_gpu(accelerator: Any) -> str | None:
    """What to say where a GPU is asked for and none is there, or one is and cannot be used, whoever asks."""
    import torch

    if accelerator not in ("auto", "gpu", "cuda") or torch.cuda.is_available():
        return None
    if count := torch.cuda.device_count():  # the driver's, which may be too old for this torch
        hint = "have driver and torch fit each other, or set it to cpu"
        return f"trainer.accelerator {accelerator}: {count} GPUs are here, and torch cannot use them ({_why()}); {hint}"
    hint = "see nvidia-smi and torch's CUDA build, or set it to cpu"
    return f"trainer.accelerator {accelerator}, and torch sees no GPU; {hint}" if accelerator != "auto" else None


def _why() -> str:
    import torch

    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    return "torch says no more"


def allow_tf32() -> None:
    """Let GPUs that have it multiply float32 matrices in TF32, several times as fast; says so."""
    import torch

    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0):
        torch.set_float32_matmul_precision("high")
        if os.environ.get("NVIDIA_TF32_OVERRIDE") != "0":
            _say("float32: matrix products in TF32; NVIDIA_TF32_OVERRIDE=0 in the environment keeps them exact")


def _say(message: str) -> None:
    from lightning.pytorch.utilities import rank_zero_only

    rank_zero_only(print)(message, file=sys.stderr)


def precision_plugin(options: dict[str, Any]) -> Any:
    """Float16 with the module's own loss scale: Lightning's refuses to clip. None for any other precision.

    Takes the precision out of the options, since Lightning wants it from one place.
    """
    if options["precision"] != "16-mixed":
        return None
    from lightning.pytorch.plugins import MixedPrecision

    del options["precision"]
    plugin = MixedPrecision("16-mixed", "cpu" if options["accelerator"] == "cpu" else "cuda")
    plugin.scaler = None
    return plugin


def seconds_allowed(max_time: Any) -> float | None:
    """A recipe's `trainer.max_time` in seconds.

    Lightning would end the run as if it had finished, and make all ranks wait for one another at each step.

    Raises InputError for what is no duration.
    """
    from lightning.pytorch.callbacks import Timer
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    from data_module.errors import InputError

    try:
        return Timer(max_time).time_remaining()
    except (MisconfigurationException, TypeError):
        raise InputError(
            f"trainer.max_time {max_time} is no duration; give days:hours:minutes:seconds, as in 00:00:45:00"
        ) from None


def cluster_environment(step: Step | None) -> Any:
    """Where ranks, and the address they meet at, come from; the first node's name and the job's number under SLURM."""
    from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment

    if step is None:
        # Left to itself, Lightning takes any process inside a job for one of its tasks.
        return LightningEnvironment() if "SLURM_JOB_ID" in os.environ and "RANK" not in os.environ else None
    # Lightning insists on this variable, which `--ntasks` alone leaves out, and reads it against the step's tasks.
    os.environ["SLURM_NTASKS_PER_NODE"] = str(step.tasks_per_node)
    return SLURMEnvironment(auto_requeue=False)


OWNED = {
    "callbacks": "this program has its own",
    "logger": "TensorBoard is always written",
    "plugins": "this program has its own",
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
"""Keys of Lightning's Trainer that this program sets itself."""


def trainer_signature() -> dict[str, Any]:
    """What a recipe's `trainer:` may hold: the keys of Lightning's Trainer that are not this program's own."""
    from lightning.pytorch import Trainer

    names = inspect.signature(Trainer.__init__).parameters
    hints = typing.get_type_hints(Trainer.__init__)
    return {name: hints[name] for name in names if name != "self" and name not in OWNED}


def best_precision(accelerator: Any) -> Any:
    """bf16 mixed precision wherever the hardware multiplies in it, else float32."""
    import torch

    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        return "bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "32-true"
    supports = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    return "bf16-mixed" if accelerator in ("auto", "cpu") and supports() else "32-true"


def compiles(asked: bool | None, accelerator: Any) -> bool:
    """Whether to train through torch.compile: as asked (`run.compile`), or else on a GPU where that is possible.

    Raises InputError when it is asked for where no compiler is, or Python's C headers are not.
    """
    import torch

    from data_module.errors import InputError

    on_gpu = accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    if asked is False or (asked is None and not on_gpu):
        return False
    # On a GPU only what starts a kernel is compiled by it, but that needs it nevertheless.
    variable, names = ("CC", ("gcc", "clang")) if on_gpu else ("CXX", ("g++", "clang++"))
    header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")  # where Triton looks, too
    if not os.environ.get(variable) and not any(map(shutil.which, names)):
        missing = f"torch.compile needs one of {', '.join(names)}, or {variable} set to a compiler"
    elif not header.exists():
        missing = f"torch.compile needs Python's C headers, python3-dev or python3-devel, and {header} is not there"
    else:
        return True
    if asked:
        raise InputError(f"run.compile: {missing}; see to that, or set run.compile to false")
    print(f"training is not compiled, which makes it slower: {missing}", file=sys.stderr)
    return False


def strategy(options: dict[str, Any], timeout_seconds: int = 600) -> Any:
    """DDP with gradients as views of its buckets, where there is more than one device."""
    import torch
    from lightning.pytorch.strategies import DDPStrategy

    devices = options.get("devices", "auto")
    if devices in ("auto", -1, "-1"):
        on_gpu = options.get("accelerator", "auto") in ("auto", "gpu", "cuda") and torch.cuda.is_available()
        devices = torch.cuda.device_count() if on_gpu else 1
    if isinstance(devices, str):
        devices = [part for part in devices.split(",") if part] if "," in devices else int(devices)
    count = len(devices) if isinstance(devices, list) else devices
    if count * int(options.get("num_nodes", 1)) > 1:
        from pipeline.training.graceful_stop import MARGIN_SECONDS

        timeout = timedelta(seconds=timeout_seconds + MARGIN_SECONDS)
        return DDPStrategy(gradient_as_bucket_view=True, timeout=timeout)
    return "auto"
