"""Devices and numeric precision: what the hardware supports, and how float16 and TF32 are set up."""

import os
from typing import Any

from data_module.errors import InputError
from pipeline.runtime.console import say
from pipeline.runtime.launch import JobStep

_BINDING = "request GPUs by --gpus-per-node, not by --gpus-per-task or --gpu-bind: each task has to see all of its node"


def missing_gpu(accelerator: Any) -> str | None:
    """Return the mistake if a GPU is requested but missing, or present but unusable; None if there is none."""
    import torch

    if accelerator not in ("auto", "gpu", "cuda") or torch.cuda.is_available():
        return None
    if count := torch.cuda.device_count():  # The driver's count; the driver may be too old for this torch.
        hint = "install a torch that fits the driver, or set it to cpu"
        unusable = f"torch cannot use the {count} GPUs of this machine ({_cuda_error()})"
        return f"trainer.accelerator {accelerator}: {unusable}; {hint}"
    hint = "check nvidia-smi and torch's CUDA build, or set it to cpu"
    return f"trainer.accelerator {accelerator}: torch finds no GPU; {hint}" if accelerator != "auto" else None


def gpus_mistake(job: JobStep, visible: int, allocated: str | None) -> str | None:
    """Return the mistake if torch does not see one GPU for each task of this node; None if it does, or sees none.

    Args:
        job: the SLURM job step of this process.
        visible: number of GPUs that torch sees.
        allocated: SLURM_GPUS_ON_NODE, if it is set.
    """
    tasks, count = job.tasks_per_node, int(allocated) if allocated and allocated.isdigit() else visible
    if visible != count:
        is_bound = 0 < visible * tasks <= count
        hint = _BINDING if is_bound else "check nvidia-smi and torch's CUDA build"
        return f"SLURM allocated {count} GPUs on this node and torch sees {visible}; {hint}"
    if visible and visible != tasks:
        hint = f"{_BINDING}, or set" if visible < tasks else f"request {tasks} GPUs per node, or set"
        return f"the node has {visible} GPUs for {tasks} tasks; {hint} --ntasks-per-node={visible}"
    return None


def _cuda_error() -> str:
    import torch

    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    return "torch gives no reason"


def allow_tf32() -> None:
    """Use TF32 for float32 matrix products on GPUs that support it, several times as fast, and report it."""
    import torch

    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0):
        torch.set_float32_matmul_precision("high")
        if os.environ.get("NVIDIA_TF32_OVERRIDE") != "0":
            say("float32: matrix products use TF32; set NVIDIA_TF32_OVERRIDE=0 in the environment for full precision")


def precision_plugin(options: dict[str, Any]) -> Any:
    """Return Lightning's plugin for float16 without its gradient scaler, None for any other precision.

    The module scales the loss itself: Lightning's scaler does not allow clipping in manual optimization. Lightning
    accepts the precision from one place, so with a plugin it has to be left out of the Trainer's options.
    """
    if options.get("precision") != "16-mixed":
        return None
    from lightning.pytorch.plugins import MixedPrecision

    plugin = MixedPrecision("16-mixed", "cpu" if options.get("accelerator") == "cpu" else "cuda")
    plugin.scaler = None
    return plugin


def best_precision(accelerator: Any) -> Any:
    """Return bf16 mixed precision if the hardware has bfloat16 matrix products, else float32."""
    import torch

    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        return "bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "32-true"
    has_products = torch.cpu.get_capabilities().get("avx512_bf16", False)
    return "bf16-mixed" if accelerator in ("auto", "cpu") and has_products else "32-true"


def device_indices(options: dict[str, Any]) -> list[int]:
    """Return the devices of this node that `devices` names; they may be more than the node has.

    Raises InputError for what names none. On a CPU, devices are processes, which have a number only.
    """
    import torch

    devices = given = options.get("devices", "auto")
    on_gpu = options.get("accelerator", "auto") in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    if devices == "auto" or (devices in (-1, "-1") and on_gpu):
        devices = torch.cuda.device_count() if on_gpu else 1
    try:
        if isinstance(devices, str):
            devices = [int(part) for part in devices.split(",") if part] if "," in devices else int(devices)
        indices = devices if isinstance(devices, list) else list(range(devices))
    except ValueError:
        indices = []
    if not indices or min(indices) < 0 or (isinstance(devices, list) and not on_gpu):
        problem = "is no choice of GPUs; give their number, -1 for all of them, a list of their indices, or auto"
        if not on_gpu:
            problem = "cannot be used on a CPU; give a number of processes, or auto"
        raise InputError(f"trainer.devices {given}: {problem}")
    return indices
