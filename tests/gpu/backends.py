"""Backends of tests and measurements, made without the checks that `choose_backend` runs first."""

from model.backend import Backend
from model.fast.compilation import CompiledForward
from model.loss import PYTORCH_LOSS
from model.packed_attention import FLASH_ATTENTION, PLAIN_ATTENTION


def make_backend(
    device: str, kernels: str = "pytorch", compiled: bool = False, precision: str = "bf16-mixed"
) -> Backend:
    """Return the backend of a GPU; on a CPU, which has no Triton, that of PyTorch's operators."""
    loss, on_gpu = PYTORCH_LOSS, device == "cuda"
    attention = FLASH_ATTENTION if on_gpu and precision.endswith("-mixed") else PLAIN_ATTENTION
    if on_gpu and kernels == "triton":
        from model.fast.triton_attention import TRITON_ATTENTION
        from model.fast.triton_loss import TRITON_LOSS

        attention, loss = TRITON_ATTENTION, TRITON_LOSS
    return Backend(precision, attention=attention, loss=loss, compiled=CompiledForward if compiled else None)
