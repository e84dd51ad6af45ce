"""Accelerator and numeric precision: what the hardware supports, and how float16 and TF32 are set up."""

import os
from typing import Any

from pipeline.runtime.console import say


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
