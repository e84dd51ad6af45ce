"""Copies of the weights in 16 bits, made once a step.

Autocast converts each weight by a kernel of its own, and each gradient back; inside a compiled graph its cache has no
effect. Here all weights are converted by one call, and the products that compute their gradients write float32.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.torch_private import copy_all, linear_relu

_PARTS = 64
"""Parts of rows in which ReLU's gradient is summed first: enough for all multiprocessors, few for one more sum."""


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


def cast_linear(module: nn.Linear, x: Tensor, activation: nn.Module | None = None) -> Tensor:
    """Apply a module and an activation to rows [R, in], by the module's 16-bit copies if it has some; return [R, out].

    With copies, ReLU is part of the product. The gradients of weight and bias are float32, in the weight's dtype.
    """
    cast: Any = getattr(module, "cast", None)
    if cast is None:
        result = module(x)
    else:
        with_relu = type(activation) is nn.ReLU
        result = _CastLinear.apply(x, module.weight, module.bias, *cast, with_relu)
        if with_relu:
            return result
    return result if activation is None else activation(result)


class _CastLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, cast_weight: Tensor, cast_bias: Tensor, with_relu: bool
    ) -> Tensor:
        x = x.to(cast_weight.dtype)
        result = linear_relu(x, cast_weight, cast_bias) if with_relu else F.linear(x, cast_weight, cast_bias)
        ctx.save_for_backward(x, cast_weight, *([result] if with_relu else []))
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *result = ctx.saved_tensors
        if result:
            # Inductor splits a sum over many rows, and then computes nothing else in its kernel. With parts given here,
            # one kernel masks the gradient and adds it up.
            parts = _PARTS if len(gradient) % _PARTS == 0 else 1
            gradient, activation = (rows.unflatten(0, (parts, len(rows) // parts)) for rows in (gradient, *result))
            gradient = gradient.where(activation > 0, 0.0)
            grad_bias = gradient.sum(1, dtype=torch.float32).sum(0)
            gradient = gradient.flatten(0, 1)
        else:
            grad_bias = gradient.sum(0, dtype=torch.float32)
        # CPUs have no product of 16-bit matrices in float32.
        on_gpu = x.device.type == "cuda"
        grad_weight = torch.mm(gradient.t(), x, out_dtype=torch.float32) if on_gpu else (gradient.t() @ x).float()
        return gradient @ weight, grad_weight, grad_bias, None, None, None
