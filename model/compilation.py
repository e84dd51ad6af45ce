"""The network's forward pass through torch.compile, without recompilation for new shapes.

Sentence lengths and batch sizes vary, so all sizes are symbolic from the first call on. On a CPU there are two graphs,
for batches with and without a source mask, and two more for sentences that exceed the table of sinusoids (1,024
tokens). On a GPU each has up to four variants, since attention kernels distinguish source and target lengths that are
multiples of 8, and more where a size decides how Inductor fuses the backward pass of layer normalization. Once all of
these exist, nothing is compiled any more.
"""

import torch
from torch import Tensor

from model.torch_private import allow_graphs, mark_dynamic
from model.transformer import Transformer

_MAX_GRAPHS = 64
"""PyTorch's default is 8, and a run that needs more ends with an error."""


class CompiledForward:
    """Compiled `network(source, target, source_mask)`.

    This is not a module, so the network keeps its parameter names and can be scripted. The network's forward hooks
    are not called.
    """

    def __init__(self, network: Transformer, backend: str = "inductor") -> None:
        """Prepare compilation, which happens in the first calls and takes about a minute each with Inductor."""
        allow_graphs(_MAX_GRAPHS)
        self._network = network
        self._compiled = torch.compile(network.forward, fullgraph=True, backend=backend)

    def __call__(self, source: Tensor, target: Tensor, source_mask: Tensor | None) -> Tensor:
        """Return decoder states [B, T, D] of ids [B, S] and [B, T] and a bool mask [B, S] or None."""
        if 1 in (*source.shape, *target.shape):
            # The compiler treats a size of 1 as a constant, so each combination would need its own graph.
            return self._network(source, target, source_mask)
        # Raise for positions that are too large here, not inside a graph.
        self._network.positions(0, max(source.size(1), target.size(1)))
        mark_dynamic(source, 0, 1)
        mark_dynamic(target, 0, 1)
        if source_mask is not None:
            mark_dynamic(source_mask, 0, 1)
        return self._compiled(source, target, source_mask)
