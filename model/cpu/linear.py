"""Linear layers that train in bfloat16 on a CPU without compiling kernels for every batch shape."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_BLOCK = 128


class Linear(nn.Linear):
    """`nn.Linear` that pads its matrix products to a multiple of 128 rows when it trains in bfloat16 on a CPU.

    There PyTorch uses oneDNN, which compiles kernels for each shape and caches those of 1,024 shapes. Batches of
    sentences rarely have the same number of rows, so without padding every step compiles: a fifth of the step time on
    a CPU with AMX (torch 2.13). The added rows are zeros and are removed from all results.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        if torch.jit.is_scripting():  # a separate `if`, so that TorchScript does not compile the rest
            return F.linear(x, self.weight, self.bias)
        if not torch.is_grad_enabled() or not compiles_each_shape(x):
            return F.linear(x, self.weight, self.bias)
        rows = x.flatten(0, -2)
        product = F.linear(_PadRows.apply(rows), self.weight, self.bias)
        return _FirstRows.apply(product, rows.size(0)).unflatten(0, x.shape[:-1])


def compiles_each_shape(x: Tensor) -> bool:
    """Return whether a product with x runs in oneDNN, which compiles kernels for each new shape."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    return dtype == torch.bfloat16


def num_missing_rows(x: Tensor) -> int:
    """Return how many rows must be added to x [rows, n] to reach a multiple of 128."""
    return -x.size(0) % _BLOCK


def pad_rows(x: Tensor) -> Tensor:
    """Pad x [rows, n] with zero rows to a multiple of 128 rows, in bfloat16."""
    missing = num_missing_rows(x)
    if not missing:
        return x.to(torch.bfloat16)
    padded = x.new_empty(x.size(0) + missing, x.size(1), dtype=torch.bfloat16)
    padded[:-missing] = x
    padded[-missing:] = 0.0
    return padded


class _PadRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.rows, ctx.dtype = x.size(0), x.dtype
        return pad_rows(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0][: ctx.rows].to(ctx.dtype)


class _FirstRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, product: Tensor, rows: int) -> Tensor:
        return product[:rows]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return pad_rows(gradients[0]), None
