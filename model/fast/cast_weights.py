"""Copies of the weights in 16 bits, made once a step.

Autocast converts each weight by a kernel of its own, and each gradient back; inside a compiled graph its cache has no
effect. Here all weights are converted by one call, and the products that compute their gradients write float32.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.torch_private import copy_all


class CastWeights:
    """16-bit copies of the weights and biases of a network's `nn.Linear` modules, for `cast_linear`."""

    def __init__(self, network: nn.Module, dtype: torch.dtype) -> None:
        """Make the copies, on the network's device. They are attributes of the modules, but no part of their state."""
        linears = [module for module in network.modules() if isinstance(module, nn.Linear)]
        self._weights: list[Tensor] = [parameter for module in linears for parameter in module.parameters()]
        self._copies = [torch.empty_like(weight, dtype=dtype) for weight in self._weights]
        copies = iter(self._copies)
        for module in linears:
            vars(module)["cast"] = [next(copies) for _ in module.parameters()]

    def refresh(self) -> None:
        """Copy the current weights."""
        with torch.no_grad():
            copy_all(self._copies, self._weights)


def cast_linear(module: nn.Linear, x: Tensor) -> Tensor:
    """Apply a module to rows [R, in], by its 16-bit copies if it has some; return [R, out].

    The gradients of weight and bias are float32, in the weight's dtype.
    """
    cast: Any = getattr(module, "cast", None)
    if cast is None:
        return module(x)
    result: Any = _CastLinear.apply(x, module.weight, module.bias, *cast)
    return result


class _CastLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, cast_weight: Tensor, cast_bias: Tensor) -> Tensor:
        x = x.to(cast_weight.dtype)
        ctx.save_for_backward(x, cast_weight)
        return F.linear(x, cast_weight, cast_bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        # CPUs have no product of 16-bit matrices in float32.
        on_gpu = x.device.type == "cuda"
        grad_weight = torch.mm(gradient.t(), x, out_dtype=torch.float32) if on_gpu else (gradient.t() @ x).float()
        return gradient @ weight, grad_weight, gradient.sum(0, dtype=torch.float32), None, None
