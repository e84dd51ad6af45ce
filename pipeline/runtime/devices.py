"""Devices and numeric precision: what the hardware supports, and how TF32 is set up."""

import os
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

from data_module.errors import InputError
from data_module.system.worker_processes import num_processors
from pipeline.runtime.console import say
from pipeline.runtime.launch import JobStep

TrainerOptions: TypeAlias = dict[str, Any]
"""Arguments of Lightning's Trainer by name: a recipe's section `trainer:`, completed by the program."""


def missing_gpu(accelerator: object) -> str | None:
    """Return the mistake if a GPU is requested but missing, or present but unusable; otherwise None."""
    if accelerator not in ("auto", "gpu", "cuda") or torch.cuda.is_available():
        return None
    if count := torch.cuda.device_count():  # The driver's count; the driver may be too old for this torch.
        hint = "install a torch that fits the driver, or set it to cpu"
        unusable = f"torch cannot use the {count} GPUs of this machine ({_cuda_error()})"
        return f"trainer.accelerator {accelerator}: {unusable}; {hint}"
    hint = "check nvidia-smi and torch's CUDA build, or set it to cpu"
    return f"trainer.accelerator {accelerator}: torch finds no GPU; {hint}" if accelerator != "auto" else None


def gpus_mistake(job: JobStep, visible: int, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the mistake if the tasks of this node cannot have one GPU each; None if they can, or if there are no GPUs.

    A task sees all GPUs of its node, or only its own (`--gpus-per-task=1`, `--gpu-bind=single:1`). `rank_checks` finds
    out whether two tasks have the same GPU. `visible` is the number of GPUs that torch sees.
    """
    tasks, allocated = job.tasks_per_node, environment.get("SLURM_GPUS_ON_NODE", "")
    # With these, SLURM may count only a task's own GPUs.
    is_bound = environment.get("SLURM_GPUS_PER_TASK") or environment.get("SLURM_GPU_BIND", "none") not in ("", "none")
    is_shared = visible == 1 < tasks and allocated == "1" and not is_bound
    if (visible in (1, tasks) and not is_shared) or (not visible and allocated in ("", "0")):
        return None
    return (
        f"torch sees {visible} of the {allocated or visible} GPUs of this node, which has {tasks} tasks; ask for a GPU"
        f" for each task, and let it see all of them (--gpus-per-node={tasks}) or its own (--gpus-per-task=1), or check"
        " nvidia-smi and torch's CUDA build"
    )


def processors_note(job: JobStep | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return a note if this process may use fewer processors than SLURM gave its task; otherwise None."""
    name = "SLURM_CPUS_PER_TASK" if environment.get("SLURM_CPUS_PER_TASK") else "SLURM_CPUS_ON_NODE"
    given = environment.get(name, "") if "SLURM_JOB_ID" in environment else ""
    if not given.isdecimal():
        return None
    count = int(given) // (job.tasks_per_node if job is not None and name == "SLURM_CPUS_ON_NODE" else 1)
    # SLURM may count more than the machine has.
    if (usable := num_processors()) >= min(count, os.cpu_count() or 1):
        return None
    return (
        f"this task may use {usable} of the {count} processors that SLURM gave it ({name} {given}) and is slowed down;"
        f" unset SLURM_CPU_BIND, start it with srun --cpus-per-task={count}, and without taskset"
    )


def sees_own_gpu_only(job: JobStep, visible: int) -> bool:
    """Return whether this task sees only its own GPU, as torch's device 0, on a node with several tasks."""
    return visible == 1 < job.tasks_per_node


def _cuda_error() -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    return "torch gives no reason"


def allow_tf32(options: TrainerOptions) -> None:
    """Use TF32, which is several times as fast, for float32 matrix products on GPUs that support it; print that."""
    is_float32 = str(options["precision"]) in ("32-true", "32") and options["accelerator"] in ("auto", "gpu", "cuda")
    if is_float32 and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0):
        torch.set_float32_matmul_precision("high")
        if os.environ.get("NVIDIA_TF32_OVERRIDE") != "0":
            say("float32: matrix products use TF32; set NVIDIA_TF32_OVERRIDE=0 in the environment for full precision")


def shared_processor(optimizer: str, gpu: int | None) -> dict[str, object]:
    """Return what ranks have to have in common beside a recipe, so that their weights do not drift apart.

    Adam's arithmetic is the same to the bit everywhere. With Muon, each rank multiplies matrices by itself, and they
    are rounded as the GPU does, or the CPU by its instructions. `gpu` is the index of this rank's; None for the CPU.
    """
    if optimizer != "muon":
        return {}
    found = torch.cpu.get_capabilities()
    products = " with bfloat16" if found.get("avx512_bf16", False) else ""
    cpu = f"{found.get('cpu_name', 'CPU')}, {torch.backends.cpu.get_cpu_capability()}{products}"
    return {"training.optimizer muon on": cpu if gpu is None else torch.cuda.get_device_name(gpu)}


def best_precision(accelerator: object) -> str:
    """Return mixed precision with bfloat16 if the hardware has bfloat16 matrix products, else float32."""
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        return "bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "32-true"
    has_products = torch.cpu.get_capabilities().get("avx512_bf16", False)
    return "bf16-mixed" if accelerator in ("auto", "cpu") and has_products else "32-true"


def device_indices(options: TrainerOptions) -> list[int]:
    """Return the devices of this node that `devices` names; they may be more than the node has.

    Raises InputError if `devices` names none. On a CPU, devices are processes, and only their number can be given.
    """
    devices = given = options.get("devices", "auto")
    on_gpu = options.get("accelerator", "auto") in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    if devices == "auto" or (devices in (-1, "-1") and on_gpu):
        devices = torch.cuda.device_count() if on_gpu else 1
    try:
        if isinstance(devices, str):
            devices = [int(part) for part in devices.split(",") if part] if "," in devices else int(devices)
        indices = devices if isinstance(devices, list) else list(range(devices if devices <= 100_000 else 0))
    except ValueError:
        indices = []
    if not indices or min(indices) < 0 or (isinstance(devices, list) and not on_gpu):
        problem = "is no choice of GPUs; give their number, -1 for all of them, a list of their indices, or auto"
        if not on_gpu:
            problem = "cannot be used on a CPU; give a number of processes, or auto"
        raise InputError(f"trainer.devices {given}: {problem}")
    return indices
