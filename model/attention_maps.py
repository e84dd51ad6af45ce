"""Attention weights of a network, for plots and for alignments.

Shapes: B sentences, S source length, T target length, H heads.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from model.attention import Attention, CrossAttention
from model.transformer import PaddedTransformer, Transformer


def sharing_copy(network: Transformer) -> Transformer:
    """Return a copy that shares all tensors, whose modules can be changed while other threads use the network."""
    attributes = (value for module in network.modules() for value in vars(module).values() if isinstance(value, Tensor))
    tensors = (*network.parameters(), *network.buffers(), *attributes)
    return copy.deepcopy(network, {id(tensor): tensor for tensor in tensors})


@torch.no_grad()
def attention_maps(
    network: Transformer, source: Tensor, target: Tensor, source_mask: Tensor | None = None
) -> dict[str, list[Tensor]]:
    """Run a forward pass and return its attention weights.

    Args:
        network: the network, in evaluation mode: with dropout, weights do not sum to one.
        source: ids [B, S].
        target: ids [B, T]. Padding on its right changes nothing before it.
        source_mask: bool [B, S], True at tokens; None if no source is padded.

    Returns:
        For "encoder", "decoder" and "cross", one tensor [B, H, queries, keys] per layer. Their last dimension sums to
        one.
    """
    network = sharing_copy(network)
    maps: dict[str, list[Tensor]] = {"encoder": [], "decoder": [], "cross": []}
    for kind, stack in (("encoder", network.encoder), ("decoder", network.decoder)):
        for layer in stack:
            for module in layer.children():
                if isinstance(module, Attention):
                    weights = maps["cross" if isinstance(module, CrossAttention) else kind]
                    module.attend = _recording(module.attend, weights)  # type: ignore[method-assign]
    PaddedTransformer(network)(source, target, source_mask)
    return maps


def _recording(attend: Callable[..., Tensor], weights: list[Tensor]) -> Callable[..., Tensor]:
    def record(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        # With the unit vectors as values, attention returns its weights.
        units = torch.eye(key.size(2), dtype=key.dtype, device=key.device).expand(*key.shape[:2], -1, -1)
        weights.append(attend(query, key, units, bias))
        return attend(query, key, value, bias)

    return record
