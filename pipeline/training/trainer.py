"""Options of Lightning's Trainer that depend on the machine and the SLURM job."""

import os
import sys
from datetime import timedelta
from typing import Any

from pipeline.runtime.slurm import JobStep
from pipeline.training.graceful_stop import MARGIN_SECONDS
from pipeline.training.precision import allow_tf32, best_precision, missing_gpu


def trainer_options(
    recipe_options: dict[str, Any], job: JobStep | None = None, timeout_seconds: int = 600
) -> dict[str, Any]:
    """Return a recipe's `trainer:` completed by accelerator, precision, devices and strategy.

    Args:
        recipe_options: the recipe's section.
        job: the SLURM job step of this process; its nodes and tasks replace those of the recipe.
        timeout_seconds: how long a rank waits for another one.

    Raises InputError for a GPU that is missing.
    """
    import torch

    from data_module.errors import InputError

    options = {"val_check_interval": 1000, "accelerator": "auto", **recipe_options}
    if missing := missing_gpu(options["accelerator"]):
        raise InputError(missing)
    if options["accelerator"] == "auto" and not torch.cuda.is_available():
        options["accelerator"] = "cpu"
    options["precision"] = options.get("precision") or best_precision(options["accelerator"])
    if str(options["precision"]) in ("32-true", "32") and options["accelerator"] in ("auto", "gpu", "cuda"):
        allow_tf32()
    if job is not None:
        options |= {"num_nodes": job.num_nodes, "devices": job.tasks_per_node}
    options["strategy"] = strategy(options, timeout_seconds)
    return options


def cluster_environment(job: JobStep | None) -> Any:
    """Return the plugin from which Lightning takes ranks and address; None leaves the choice to Lightning."""
    from lightning.pytorch.plugins.environments import LightningEnvironment

    from pipeline.training.step_environment import StepEnvironment

    if job is None:
        # Lightning would take any process inside a job for one of its tasks.
        return LightningEnvironment() if "SLURM_JOB_ID" in os.environ and "RANK" not in os.environ else None
    return StepEnvironment(job)


def strategy(options: dict[str, Any], timeout_seconds: int = 600) -> Any:
    """Return DDP, with gradients as views of its buckets, for more than one device; else Lightning's choice.

    Raises InputError for more than one device in an interactive session: other ranks could not be started there.
    """
    from data_module.errors import InputError
    from pipeline.compat.lightning import SingleStreamDDP

    num_devices = len(device_indices(options))
    if num_devices * int(options.get("num_nodes", 1)) > 1:
        if hasattr(sys, "ps1"):
            raise InputError(
                f"trainer.devices: a notebook trains on one device, not {num_devices}; set it to 1, or use the "
                "command fit"
            )
        timeout = timedelta(seconds=timeout_seconds + MARGIN_SECONDS)
        return SingleStreamDDP(gradient_as_bucket_view=True, timeout=timeout)
    return "auto"


def device_indices(options: dict[str, Any]) -> list[int]:
    """Return the devices of this node that `devices` names; they may be more than the node has."""
    import torch

    devices = options.get("devices", "auto")
    if devices in ("auto", -1, "-1"):
        on_gpu = options.get("accelerator", "auto") in ("auto", "gpu", "cuda") and torch.cuda.is_available()
        devices = torch.cuda.device_count() if on_gpu else 1
    if isinstance(devices, str):
        devices = [int(part) for part in devices.split(",") if part] if "," in devices else int(devices)
    return devices if isinstance(devices, list) else list(range(devices))
