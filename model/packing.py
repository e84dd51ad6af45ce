"""Replacement of a network's linear layers by layers with packed weights (`fast/packed_linear.py`), for decoding."""

import copy

import torch
from torch import Tensor, nn

from model.fast.packed_linear import LazyPackedLinear, LazyPackedProjection, PackedLinear, PackedProjection
from model.transformer import Transformer


def can_pack(network: Transformer) -> bool:
    """Return whether the network is on a CPU and in float32, and PyTorch was built with oneDNN."""
    weight = network.embedding.weight
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()


def pack_linears(network: Transformer) -> None:
    """Replace all linear layers and the output projection, in place. The network can only decode afterwards."""
    _replace_linears(network, PackedLinear)
    network.projection = PackedProjection(network.embedding.weight, _bias(network))


def strip_weights(network: Transformer) -> Transformer:
    """Return a copy for TorchScript that has no weights and packs the weights that it is given.

    The copy's parameters have the names and shapes of the network's, but share the storage of a single element. Set
    the data of each to the network's before the first call.
    """
    stripped = copy.deepcopy(network)
    _replace_linears(stripped, LazyPackedLinear)
    stripped.projection = LazyPackedProjection(_bias(network))
    for parameter in stripped.parameters():
        parameter.requires_grad_(False)
        parameter.data = torch.zeros(1).expand(parameter.shape)
    return stripped


def _bias(network: Transformer) -> Tensor | None:
    """Return the output projection's bias, None if it has none."""
    bias = network.projection.bias
    assert bias is None or isinstance(bias, Tensor)
    return bias


def _replace_linears(network: Transformer, kind: type[PackedLinear] | type[LazyPackedLinear]) -> None:
    for module in list(network.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, kind(child.weight, child.bias))
