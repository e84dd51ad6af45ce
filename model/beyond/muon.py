"""Muon: momentum whose update of each projection is orthogonalized (Jordan et al. 2024).

A gradient of a matrix has few large singular values. Muon replaces the singular values of the averaged gradient by
about 1, so that a step moves rare directions as far as common ones. Shapes: N matrices of one shape, M rows, K columns.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from model.torch_private import copy_all, set_gradient_scaling

_COEFFICIENTS = 3.4445, -4.7750, 2.0315
_NUM_ITERATIONS = 5
_MIN_NORM = 1e-7
_RMS = 0.2
"""Root mean square of an update divided by the learning rate: about that of Adam's, so that both share one rate."""


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return matrices [N, M, K] with about the same singular vectors and singular values between 0.7 and 1.2.

    Five iterations of Newton and Schulz, each the polynomial a x + b x^3 + c x^5 of all singular values. Its
    coefficients are those that lift small values fastest; with them it does not converge to 1. The products of
    float32 matrices are in bfloat16 where the device has such products.
    """
    is_tall = matrices.size(1) > matrices.size(2)
    x = matrices.mT if is_tall else matrices
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=_MIN_NORM)
    if x.dtype == torch.float32 and _has_bfloat16(matrices.device.type):
        x = x.bfloat16()
    a, b, c = _COEFFICIENTS
    for _ in range(_NUM_ITERATIONS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).to(matrices.dtype)


def _has_bfloat16(device: str) -> bool:
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return bool(torch.cpu.get_capabilities().get("avx512_bf16", False))


class Muon(Optimizer):
    """Muon with Nesterov's momentum for projections, another optimizer for all other parameters.

    Update, for a learning rate r: W <- W - r (0.2 sqrt(max(M, K)) orthogonalize(...) + weight_decay W). Like PyTorch's
    fused optimizers, a step divides gradients by `grad_scale` and changes nothing if `found_inf` is 1, on the device.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self, projections: Sequence[nn.Parameter], others: Optimizer, momentum: float, weight_decay: float
    ) -> None:
        """Start with momentum 0 and learning rate 0.

        Args:
            projections: matrices [M, K] whose attribute `projections` lists how many rows each projection has that a
                matrix holds. Each is orthogonalized by itself.
            others: a fused optimizer of all other parameters.
            momentum: decay of the mean of gradients.
            weight_decay: share of a weight, times the learning rate, that each step subtracts.
        """
        self._others = others
        group = {"params": list(projections), "lr": 0.0, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__([group, *others.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Take one step; return what `closure` returns."""
        scale, skip = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        group, *others = self.param_groups
        # Loading a state replaces both.
        self._others.param_groups, self._others.state = others, self.state
        set_gradient_scaling(self._others, scale, skip)
        result = self._others.step(closure)
        by_shape: dict[torch.Size, list[tuple[Tensor, ...]]] = {}
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter)
            parts = [tensor.split(parameter.projections) for tensor in (parameter, parameter.grad, state["momentum"])]
            for part in zip(*parts, strict=True):
                by_shape.setdefault(part[0].shape, []).append(part)
        for matrices in by_shape.values():
            _step(matrices, group, scale, skip)
        return result


def _step(
    matrices: list[tuple[Tensor, ...]], group: Mapping[str, float], scale: Tensor | None, skip: Tensor | None
) -> None:
    """Update (weight, gradient, momentum), each [M, K], of N projections at once."""
    weight, gradient, momentum = (torch.stack(tensors) for tensors in zip(*matrices, strict=True))
    if scale is not None:
        gradient = gradient / scale
    rate, beta = group["lr"], group["momentum"]
    new_momentum = momentum.lerp(gradient, 1.0 - beta)
    update = orthogonalize(gradient.lerp(new_momentum, beta))
    factor = _RMS * math.sqrt(max(weight.shape[1:]))
    new_weight = weight * (1.0 - rate * group["weight_decay"]) - update * (rate * factor)
    if skip is not None:
        new_weight, new_momentum = weight.where(skip > 0, new_weight), momentum.where(skip > 0, new_momentum)
    copy_all([part[0] for part in matrices], list(new_weight.unbind()))
    copy_all([part[2] for part in matrices], list(new_momentum.unbind()))
