"""Accelerator and numeric precision: what the hardware supports, and how float16 and TF32 are set up."""

import os
from typing import Any

from pipeline.runtime.console import say


def missing_gpu(accelerator: Any) -> str | None:
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
            say("float32: matrix products in TF32; NVIDIA_TF32_OVERRIDE=0 in the environment keeps them exact")


def precision_plugin(options: dict[str, Any]) -> Any:
    """Return Lightning's plugin for float16 without its gradient scaler, None for any other precision.

    The module scales the loss itself: Lightning's scaler does not allow clipping in manual optimization. Lightning
    accepts the precision from one place, so with a plugin it has to be left out of the Trainer's options.
    """
    if options["precision"] != "16-mixed":
        return None
    from lightning.pytorch.plugins import MixedPrecision

    plugin = MixedPrecision("16-mixed", "cpu" if options["accelerator"] == "cpu" else "cuda")
    plugin.scaler = None
    return plugin


def best_precision(accelerator: Any) -> Any:
    """bf16 mixed precision wherever the hardware multiplies in it, else float32."""
    import torch

    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        return "bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "32-true"
    supports = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    return "bf16-mixed" if accelerator in ("auto", "cpu") and supports() else "32-true"
