"""Attention weights of every layer and head, to be looked at. Training neither computes nor keeps them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from model.attention import CrossAttention, SelfAttention
from model.transformer import Transformer


@torch.no_grad()
def attention_maps(
    network: Transformer, source: Tensor, target: Tensor, source_mask: Tensor | None = None
) -> dict[str, list[Tensor]]:
    """What a forward pass over these ids attends to.

    Args:
        network: it is run as it is, so in evaluation mode, unless dropout shall be seen at work.
        source, target, source_mask: as for `Transformer.forward`.

    Returns: for "encoder", "decoder" and "cross" one tensor a layer, [B, H, queries, keys], rows that sum to one.
    """
    maps: dict[str, list[Tensor]] = {"encoder": [], "decoder": [], "cross": []}
    handles = []
    for kind, stack in (("encoder", network.encoder), ("decoder", network.decoder)):
        for layer in stack:
            for module in layer.children():
                if isinstance(module, (SelfAttention, CrossAttention)):
                    into = maps["cross" if isinstance(module, CrossAttention) else kind]
                    handles.append(module.register_forward_pre_hook(_recorder(into)))
    try:
        network(source, target, source_mask)
    finally:
        for handle in handles:
            handle.remove()
    return maps


def _recorder(into: list[Tensor]) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def record(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        into.append(module.weights(*inputs))  # type: ignore[operator]

    return record
