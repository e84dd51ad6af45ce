"""Dropout (section 5.4) with faster random number generation on the CPU."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_LEVELS = 1 << 16


class Dropout(nn.Module):
    """Zero each element with probability `p` and scale the others by 1 / (1 - p), in training mode only.

    On a CPU, `torch.nn.Dropout` draws one float per element on a single core, which takes longer than the matrix
    products of a small layer. This module draws one 64-bit integer per four elements instead. There `p` is rounded to
    a multiple of 1 / 65,536, and to 65,535 / 65,536 at most.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Apply dropout to x of any shape."""
        if not self.training or self.p == 0.0:
            return x
        if torch.jit.is_scripting() or torch.compiler.is_compiling() or x.device.type != "cpu":
            return F.dropout(x, self.p, True)
        return x * cpu_dropout_scale(x, self.p)


def cpu_dropout_scale(x: Tensor, p: float) -> Tensor:
    """Return a tensor like x whose elements are 0 with probability p and 1 / (1 - p) otherwise."""
    draws = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    levels = draws.view(torch.int16)[: x.numel()].view(x.shape)
    dropped = min(round(p * _LEVELS), _LEVELS - 1)  # _LEVELS would make the scale infinite
    keep = levels >= dropped - _LEVELS // 2
    return keep.to(x.dtype).mul_(_LEVELS / (_LEVELS - dropped))
