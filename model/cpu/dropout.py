"""Dropout (section 5.4) with a faster source of random numbers on the CPU."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_LEVELS = 1 << 16


class Dropout(nn.Module):
    """Zeroes each element with probability `p` and scales the others by 1 / (1 - p), in training only.

    PyTorch draws one float a CPU element, one core at a time, which costs more than a small layer's products.
    Here one 64-bit number serves four elements, so `p` is rounded to a 65,536th, and down to 65,535 of them at most.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and type as x."""
        if not self.training or self.p == 0.0:
            return x
        if torch.jit.is_scripting() or torch.compiler.is_compiling() or x.device.type != "cpu":
            return F.dropout(x, self.p, True)
        return x * cpu_dropout_scale(x, self.p)


def cpu_dropout_scale(x: Tensor, p: float) -> Tensor:
    """A tensor like x of 0 with probability p and 1 / (1 - p) otherwise."""
    draws = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    levels = draws.view(torch.int16)[: x.numel()].view(x.shape)
    dropped = min(round(p * _LEVELS), _LEVELS - 1)  # all of them would leave a scale without end
    keep = levels >= dropped - _LEVELS // 2
    return keep.to(x.dtype).mul_(_LEVELS / (_LEVELS - dropped))
