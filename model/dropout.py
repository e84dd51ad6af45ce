"""Dropout (section 5.4) with faster random number generation on the CPU."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_LEVELS = 1 << 15
"""Probabilities are rounded to multiples of 1 / _LEVELS."""


class Dropout(nn.Module):
    """Zero each element with probability `p` and scale the others by 1 / (1 - p), in training mode only.

    On a CPU, `torch.nn.Dropout` draws one float per element on a single core, which takes longer than the matrix
    products of a small layer. This module draws one 64-bit integer per four elements instead. There `p` is rounded to
    a multiple of 1 / 32,768, and to 32,767 / 32,768 at most.
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
        return x * _cpu_factors(x, self.p)


def _cpu_factors(x: Tensor, p: float) -> Tensor:
    """Return a tensor like x whose elements are 0 with probability p and 1 / (1 - p) otherwise."""
    draws = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    bits = draws.view(torch.int16)[: x.numel()].view(x.shape)
    dropped = min(round(p * _LEVELS), _LEVELS - 1)  # _LEVELS would make the factor infinite
    factor = torch.tensor(_LEVELS / (_LEVELS - dropped), dtype=x.dtype)
    # Integer operations, since converting booleans to numbers takes several times as long. The difference is negative
    # where an element is dropped, and its sign, shifted, fills all bits.
    kept = (bits & (_LEVELS - 1)).sub_(dropped).bitwise_right_shift_(15).bitwise_not_()
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return kept.to(integers).bitwise_and_(factor.view(integers)).view(x.dtype)
