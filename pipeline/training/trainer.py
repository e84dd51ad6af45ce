"""Lightning's Trainer, and those of its options that depend on the machine and the SLURM job."""

import os
import sys
from typing import TYPE_CHECKING, Any

from pipeline.runtime.devices import (
    allow_tf32,
    best_precision,
    device_indices,
    missing_gpu,
    precision_plugin,
    sees_own_gpu_only,
)
from pipeline.runtime.launch import JobStep

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def trainer_options(
    recipe_options: dict[str, Any], job: JobStep | None = None, timeout_seconds: int = 600
) -> dict[str, Any]:
    """Return a recipe's `trainer:` completed by accelerator, precision, devices and strategy.

    Args:
        recipe_options: the recipe's section.
        job: the SLURM job step of this process; its nodes and tasks replace those of the recipe.
        timeout_seconds: how long a rank waits for another one.

    Raises InputError for a GPU that is missing, and for `devices` that are none.
    """
    options = complete_options(recipe_options, job, timeout_seconds)
    if str(options["precision"]) in ("32-true", "32") and options["accelerator"] in ("auto", "gpu", "cuda"):
        allow_tf32()
    return options


def complete_options(recipe_options: dict[str, Any], job: JobStep | None, timeout_seconds: int) -> dict[str, Any]:
    """Do what `trainer_options` does, without changing how PyTorch multiplies."""
    import torch

    from data_module.errors import InputError

    options = {"val_check_interval": 1000, "accelerator": "auto", **recipe_options}
    if missing := missing_gpu(options["accelerator"]):
        raise InputError(missing)
    if options["accelerator"] == "auto" and not torch.cuda.is_available():
        options["accelerator"] = "cpu"
    options["precision"] = options.get("precision") or best_precision(options["accelerator"])
    if job is not None:
        options |= {"num_nodes": job.num_nodes, "devices": job.tasks_per_node}
    options["strategy"] = strategy(options, timeout_seconds)
    if job is not None and options["accelerator"] != "cpu" and sees_own_gpu_only(job, torch.cuda.device_count()):
        # Lightning refuses `devices` that this process does not see. Ranks of a node are counted by `parallel_devices`,
        # of which each rank takes that of its index.
        options["strategy"].parallel_devices = [torch.device("cuda", 0)] * job.tasks_per_node
        options["devices"] = 1
    return options


def make_trainer(options: dict[str, Any], job: JobStep | None, plugins: tuple[Any, ...] = (), **own: Any) -> "Trainer":
    """Return Lightning's Trainer.

    Args:
        options: those of `trainer_options`.
        job: the SLURM job step of this process.
        plugins: Lightning's plugins beside those for the precision and the job.
        own: further arguments of the Trainer.

    Raises InputError for what Lightning refuses; it names the key.
    """
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    from data_module.errors import InputError

    refusals = (MisconfigurationException, ValueError, ImportError)
    try:
        return _make_trainer(options, job, plugins, own)
    except refusals as error:
        refused = "trainer"
        for key in options:
            rest = {name: value for name, value in options.items() if name not in (key, "strategy")}
            try:
                _make_trainer(rest | {"strategy": strategy(rest)}, job, (), {"logger": False})
            except refusals:
                continue
            refused = f"trainer.{key} {options[key]}"
            break
        raise InputError(f"{refused}: {' '.join(str(error).split())}") from None


def _make_trainer(
    options: dict[str, Any], job: JobStep | None, plugins: tuple[Any, ...], own: dict[str, Any]
) -> "Trainer":
    from lightning.pytorch import Trainer
    from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment

    from data_module.errors import InputError

    float16 = precision_plugin(options)
    given = [*plugins, cluster_environment(job), float16]
    # `GracefulStop` ends the run in time; Lightning accepts the precision from one place.
    elsewhere = ("max_time",) if float16 is None else ("max_time", "precision")
    trainer = Trainer(
        **{key: value for key, value in options.items() if key not in elsewhere},
        max_epochs=-1,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        plugins=[plugin for plugin in given if plugin is not None],
        **own,
    )
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if isinstance(environment, LightningEnvironment) and trainer.num_nodes > 1:
        raise InputError(
            f"trainer.num_nodes {trainer.num_nodes}: nothing starts ranks on other nodes here; use srun in a SLURM job,"
            " as slurm/train.sbatch does, or torchrun on each node, or set it to 1"
        )
    if environment is None and TorchElasticEnvironment.detect():
        environment = TorchElasticEnvironment()
    if environment is not None:
        environment.validate_settings(trainer.num_devices, trainer.num_nodes)
    return trainer


def cluster_environment(job: JobStep | None) -> Any:
    """Return the plugin from which Lightning takes ranks and address; None leaves the choice to Lightning."""
    from lightning.pytorch.plugins.environments import LightningEnvironment

    from pipeline.training.ddp import StepEnvironment

    if job is None:
        # Lightning would take any process inside a job for one of its tasks.
        return LightningEnvironment() if "SLURM_JOB_ID" in os.environ and "RANK" not in os.environ else None
    return StepEnvironment(job)


def strategy(options: dict[str, Any], timeout_seconds: int = 600) -> Any:
    """Return DDP, with gradients as views of its buckets, for more than one device; else Lightning's choice.

    Raises InputError for more than one device in an interactive session: other ranks could not be started there.
    """
    from data_module.errors import InputError
    from pipeline.training.ddp import ConnectedDDP

    num_devices = len(device_indices(options))
    if num_devices * int(options.get("num_nodes", 1)) > 1:
        if hasattr(sys, "ps1"):
            raise InputError(
                f"trainer.devices: a notebook trains on one device, not {num_devices}; set it to 1, or use the "
                "command fit"
            )
        return ConnectedDDP(timeout_seconds)
    return "auto"
