"""PyTorch's private interfaces that `model` uses, one function for each.

`pipeline.runtime.torch_private` has the others.

Each docstring names the public interface that the function stands for, and the PyTorch versions in which the private
one was found. tests/model/test_torch_private.py fails if PyTorch moves one of them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def pack_weight(weight: Tensor) -> Tensor:
    """Copy a float32 weight [out, in] to oneDNN's layout, for `packed_linear`.

    Public: none. The operator exists only if PyTorch was built with oneDNN. Seen in 2.11 to 2.13.
    """
    return torch.ops.mkldnn._reorder_linear_weight(weight)


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `F.linear` [..., in] -> [..., out] with a weight that `pack_weight` returned.

    Public: `torch.nn.functional.linear`, which takes plain weights only. Seen in 2.11 to 2.13.
    """
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors in place in one call. Public: `Tensor.copy_`, one tensor a call. Seen in 2.11 to 2.13."""
    torch._foreach_copy_(targets, sources)


def total_norm(tensors: list[Tensor]) -> Tensor:
    """Return the 2-norm of tensors of one device as if they were one.

    Public: `torch.nn.utils.get_total_norm`, which first looks for tensors of other devices, several times as long as
    the host takes for the norm itself. Seen in 2.11 to 2.13.
    """
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))


def skips_non_finite_steps(optimizer: Optimizer) -> bool:
    """Return whether the optimizer reads what `set_gradient_scaling` sets. PyTorch's fused optimizers do.

    SGD with momentum reads it, but a first step that is skipped leaves its momentum uninitialized.

    Public: `torch.amp.GradScaler`, which reads the same attribute. Seen in 2.11 to 2.13.
    """
    if isinstance(optimizer, torch.optim.SGD) and any(group["momentum"] for group in optimizer.param_groups):
        return False
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def set_gradient_scaling(optimizer: Any, scale: Tensor | None, found_inf: Tensor | None) -> None:
    """Let the optimizer's next step divide gradients by `scale`, and do nothing if `found_inf` is 1.

    The optimizer reads both on its own device, so the host does not wait for it.

    Public: `torch.amp.GradScaler`, which sets the same attributes. Seen in 2.11 to 2.13.
    """
    optimizer.grad_scale, optimizer.found_inf = scale, found_inf


def default_generator(device: torch.device) -> torch.Generator:
    """Return the random number generator that dropout on `device` draws from.

    Public: `torch.default_generator`, for CPUs only. `torch.manual_seed` seeds all generators, but on a machine
    without CUDA each call keeps a copy of its caller's stack for when CUDA is initialized. Seen in 2.11 to 2.13.
    """
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
