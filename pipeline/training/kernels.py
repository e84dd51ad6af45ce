"""Which kernels compute attention and the loss: the project's own or PyTorch's.

The project's own are written in Triton for GPUs, and in C++ for the loss on CPUs.
"""

from typing import TYPE_CHECKING, Any

from data_module.errors import InputError
from model.settings import NetworkSettings
from pipeline.runtime.console import say
from pipeline.runtime.launch import local_rank
from pipeline.training.compilation import missing_compiler
from pipeline.training.trainer import device_indices

if TYPE_CHECKING:
    from model.fast.compiled_loss import CompiledLoss

_COMPILED_LOSS = ("bf16-mixed", "32-true", "32")
"""Precisions on a CPU that the compiled loss computes in."""


def choose_kernels(requested: str | None, options: dict[str, Any], network: NetworkSettings) -> str:
    """Return "triton" or "pytorch": what `run.kernels` says, or if null Triton's kernels where they can run.

    Triton's kernels are compiled, run and compared with PyTorch's here, which takes some seconds the first time.

    Args:
        requested: `run.kernels`.
        options: accelerator, precision and devices, as `trainer_options` returns them.
        network: the recipe's `network:`.

    Raises InputError when Triton's kernels are requested and cannot run.
    """
    import torch

    on_gpu = options["accelerator"] != "cpu" and torch.cuda.is_available()
    if requested == "pytorch" or (requested is None and not on_gpu):
        return "pytorch"
    obstacle = _obstacle(options, network) if on_gpu else "they need a GPU"
    if obstacle is None:
        return "triton"
    if requested is not None:
        raise InputError(f"run.kernels {requested}: {obstacle}; set it to pytorch, or to null")
    say(f"training with PyTorch's kernels instead of Triton's: {obstacle}")
    return "pytorch"


def choose_loss(requested: str | None, options: dict[str, Any]) -> "CompiledLoss | None":
    """Return the compiled loss for training on a CPU, where it can be compiled; None for PyTorch's operators.

    Args:
        requested: `run.kernels`; "pytorch" excludes the compiled loss.
        options: accelerator and precision, as `trainer_options` returns them.
    """
    if options["accelerator"] != "cpu" or requested == "pytorch" or str(options["precision"]) not in _COMPILED_LOSS:
        return None
    from pipeline.training.compiled_loss import load_compiled_loss

    return load_compiled_loss()


def _own_device(options: dict[str, Any]) -> int:
    """Return the index of the GPU that Lightning will give to this process."""
    import torch

    indices, rank = device_indices(options), local_rank()
    index = indices[rank] if rank < len(indices) else 0
    return index if index < torch.cuda.device_count() else 0  # Lightning reports the mistake.


def _obstacle(options: dict[str, Any], network: NetworkSettings) -> str | None:
    """Return why Triton's kernels cannot run on this process's GPU; None if they can."""
    import torch

    device = _own_device(options)
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return (
            f"they need a GPU of compute capability 8.0, and {torch.cuda.get_device_name(device)} has {major}.{minor}"
        )
    if missing := missing_compiler(on_gpu=True):
        return f"Triton {missing}"
    try:
        from model.fast import triton_attention, triton_check
    except ImportError as error:
        return f"Triton is not installed or does not work ({error})"
    d_k, d_v = network.key_size, network.value_size
    if not triton_attention.can_run(d_k, d_v):
        return f"they do not take heads with d_k {d_k} and d_v {d_v}"
    dtypes = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
    dtype = dtypes.get(str(options["precision"]), torch.float32)
    with torch.cuda.device(device):  # The processes of a node would otherwise all take memory of its first GPU.
        return triton_check.failure(dtype, network.num_heads, d_k, d_v)
