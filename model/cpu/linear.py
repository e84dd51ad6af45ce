"""Linear layers that train in bfloat16 on a CPU without new kernels for every batch."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_BLOCK = 128


class Linear(nn.Linear):
    """As `nn.Linear`; where it trains in bfloat16 on a CPU, its products have a multiple of 128 rows.

    oneDNN, which multiplies bfloat16 there, compiles kernels for each shape and keeps those of 1,024. Two batches of
    sentences seldom have equally many rows, so that every step waited for the compiler: on a CPU with AMX for a
    fifth of its time (torch 2.13). The rows added are zeros, of which nothing is left in any result.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if torch.jit.is_scripting():  # on its own, or TorchScript reads on
            return F.linear(x, self.weight, self.bias)
        if not torch.is_grad_enabled() or not compiles_each_shape(x):
            return F.linear(x, self.weight, self.bias)
        rows = x.flatten(0, -2)
        product = F.linear(_WholeBlocks.apply(rows), self.weight, self.bias)
        return _FirstRows.apply(product, rows.size(0)).unflatten(0, x.shape[:-1])


def compiles_each_shape(x: Tensor) -> bool:
    """Whether oneDNN multiplies x, so that each new shape costs the time to compile kernels for it."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    return dtype == torch.bfloat16


def rows_missing(x: Tensor) -> int:
    """How many rows [rows, n] lacks to a multiple of 128."""
    return -x.size(0) % _BLOCK


def whole_blocks(x: Tensor) -> Tensor:
    """[rows, n] -> [a multiple of 128, n] in bfloat16, zeros below."""
    missing = rows_missing(x)
    if not missing:
        return x.to(torch.bfloat16)
    padded = x.new_empty(x.size(0) + missing, x.size(1), dtype=torch.bfloat16)
    padded[:-missing] = x
    padded[-missing:] = 0.0
    return padded


class _WholeBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.rows, ctx.dtype = x.size(0), x.dtype
        return whole_blocks(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0][: ctx.rows].to(ctx.dtype)


class _FirstRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, product: Tensor, rows: int) -> Tensor:
        return product[:rows]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return whole_blocks(gradients[0]), None
