"""Linear layers with packed weights, for decoding in float32 on an x86 CPU.

For float32 products, PyTorch calls MKL, which converts the weight to its internal layout in each call. oneDNN, which
PyTorch includes, accepts a weight that was converted once. For the few vectors of a decoding step this is two to three
times as fast. On AMD CPUs, where MKL does not use AVX-512, it is twice as fast for many vectors too (torch 2.13). The
results differ by rounding.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.torch_private import pack_weight, packed_linear
from model.transformer import Transformer

SMALL_PRODUCT = 1 << 19
"""Number of multiplications up to which MKL is faster."""


class PackedLinear(nn.Module):
    """`nn.Linear` with a packed weight, without gradients. It cannot move to another device."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.packed = pack_weight(weight.detach())
        self.bias = bias.detach() if bias is not None else None
        # Keep the plain weight only if some inputs are small enough for MKL to be faster.
        self.most_rows = SMALL_PRODUCT // weight.numel()
        self.weight = weight.detach() if self.most_rows else None

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        if self.weight is not None and x.numel() <= self.most_rows * x.size(-1):
            return F.linear(x, self.weight, self.bias)
        return packed_linear(x, self.packed, self.bias)


class PackedProjection(PackedLinear):
    """`transformer.Projection` with a packed weight."""

    def forward(self, states: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        """Map states [..., D] to logits [..., V]. `weight` is ignored: it is the matrix that was packed."""
        return super().forward(states)


def can_pack(network: Transformer) -> bool:
    """Return whether the network is on a CPU and in float32, and PyTorch was built with oneDNN."""
    weight = network.embedding.weight
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()


def pack_linears(network: Transformer) -> None:
    """Replace all linear layers and the output projection, in place. The network can only decode afterwards."""
    for module in list(network.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, PackedLinear(child.weight, child.bias))
    bias = network.projection.bias
    assert bias is None or isinstance(bias, Tensor)
    network.projection = PackedProjection(network.embedding.weight, bias)
