"""Attention weights of every layer and head, for inspection."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from model.attention import CrossAttention, SelfAttention
from model.transformer import Transformer


@torch.no_grad()
def attention_maps(network: Transformer, source: Tensor, target: Tensor) -> dict[str, list[Tensor]]:
    """Run a forward pass and return its attention weights.

    Args:
        network: the network, in evaluation mode unless dropout should be active.
        source: ids [B, S], of sentences of one length.
        target: ids [B, T], likewise.

    Returns:
        For "encoder", "decoder" and "cross", one tensor [B, H, queries, keys] per layer. Rows sum to one.
    """
    # Hooks on a copy that shares all tensors: other threads may use the network at the same time.
    attributes = (one for module in network.modules() for one in vars(module).values() if isinstance(one, Tensor))
    tensors = (*network.parameters(), *network.buffers(), *attributes)
    network = copy.deepcopy(network, {id(tensor): tensor for tensor in tensors})
    maps: dict[str, list[Tensor]] = {"encoder": [], "decoder": [], "cross": []}
    for kind, stack in (("encoder", network.encoder), ("decoder", network.decoder)):
        for layer in stack:
            for module in layer.children():
                if isinstance(module, (SelfAttention, CrossAttention)):
                    into = maps["cross" if isinstance(module, CrossAttention) else kind]
                    module.register_forward_pre_hook(_recorder(into))
    network(source, target)
    return maps


def _recorder(into: list[Tensor]) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def record(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        into.append(module.weights(*inputs))  # type: ignore[operator]

    return record
