"""Linear layers whose weights lie packed, for decoding in float32 on an x86 CPU.

PyTorch multiplies float32 with MKL and lays each weight out anew at each call. oneDNN, which is in PyTorch too, takes
a weight that was laid out once: for the few rows of a decoding step two to three times as fast, and on an AMD CPU,
where MKL leaves AVX-512 alone, twice as fast for many rows too (torch 2.13). The results differ by rounding.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.transformer import Transformer

SMALL_PRODUCT = 1 << 19
"""Multiplications up to which MKL is faster."""


class PackedLinear(nn.Module):
    """As the `nn.Linear` that it is made of; without a gradient, and it does not move to another device."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        self.bias = bias.detach() if bias is not None else None
        # Kept where it can serve, for one row at least.
        self.most_rows = SMALL_PRODUCT // weight.numel()
        self.weight = weight.detach() if self.most_rows else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if self.weight is not None and x.numel() <= self.most_rows * x.size(-1):
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


class PackedProjection(PackedLinear):
    """As `transformer.Projection`, with its matrix packed."""

    def forward(self, states: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        """[..., D] -> [..., V]; the matrix given is the one that was packed."""
        return super().forward(states)


def can_pack(network: Transformer) -> bool:
    """Whether the network is on a CPU, in float32, and PyTorch was built with oneDNN."""
    weight = network.embedding.weight
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()


def pack_linears(network: Transformer) -> None:
    """Replace all linear layers and the output projection, in place; the network then only decodes."""
    for module in list(network.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, PackedLinear(child.weight, child.bias))
    network.projection = PackedProjection(network.embedding.weight, None)
