"""Packed linear layers (`packed_linear.py`) for TorchScript: the weights come later, and are packed when first used.

A packed weight cannot be saved, and its operators are only in a PyTorch that was built with oneDNN. So an exported
search has a twin without weights that gets them after loading, on a CPU.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.cpu.packed_linear import SMALL_PRODUCT
from model.transformer import Transformer


class LazyPackedLinear(nn.Module):
    """As `PackedLinear`, with the weight and bias that it finds in its parameters when it is first called."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.bias = nn.Parameter(bias.detach(), requires_grad=False)
        self.packed = torch.empty(0)
        self.most_rows = SMALL_PRODUCT // weight.numel()

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if x.numel() <= self.most_rows * x.size(-1):
            return F.linear(x, self.weight, self.bias)
        if self.packed.numel() == 0:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


class LazyPackedProjection(nn.Module):
    """As `transformer.Projection`, with the matrix that it is first called with."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = torch.empty(0)

    def forward(self, states: Tensor, weight: Tensor) -> Tensor:
        """[..., D] and [V, D] -> [..., V]."""
        if self.packed.numel() == 0:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        return torch.ops.mkldnn._linear_pointwise(states, self.packed, None, "none", [], "")


def strip_weights(network: Transformer) -> Transformer:
    """A copy for scripting that packs at first use, whose parameters have the network's names and shapes and no bytes.

    Before it is used, each parameter's data must be set to the network's.
    """
    hollow = copy.deepcopy(network)
    for module in list(hollow.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, LazyPackedLinear(child.weight, child.bias))
    hollow.projection = LazyPackedProjection()
    for parameter in hollow.parameters():
        parameter.requires_grad_(False)
        parameter.data = torch.zeros(1).expand(parameter.shape)
    return hollow
