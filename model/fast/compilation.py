"""The network's forward pass over packed micro-batches through torch.compile.

Sentences that lie end to end have one shape, so there is one graph. Blocks differ in number. A graph runs any number of
blocks of each width, and there is at most one graph for each set of widths.
"""

import torch
from torch import Tensor

from model.packed_attention import Segments
from model.torch_private import allow_graphs, mark_dynamic
from model.transformer import Transformer

_MAX_GRAPHS = 64
"""PyTorch's default is 8, and a run that needs more ends with an error."""


class CompiledForward:
    """Compiled `network.rows`.

    This is not a module, so the network keeps its parameter names and can be scripted. The network's forward hooks
    are not called.
    """

    def __init__(self, network: Transformer, backend: str = "inductor") -> None:
        """Prepare compilation, which happens in the first calls and takes about a minute with Inductor."""
        allow_graphs(_MAX_GRAPHS)
        self._network = network
        self._compiled = torch.compile(network.rows, fullgraph=True, backend=backend)

    def __call__(
        self,
        source: tuple[Tensor, Tensor],
        target: tuple[Tensor, Tensor],
        segments: tuple[Segments, Segments, Segments],
    ) -> Tensor:
        """Return decoder states [M, D]; see `Transformer.rows`."""
        # Raise for positions that are too large here, not inside a graph.
        self._network.positions(0, segments[0].longest)
        # The blocks of all three attentions are the same.
        if segments[0].biases:
            for tensor in (*source, *target, *(bias for attention in segments for bias in attention.biases)):
                mark_dynamic(tensor, 0)
        return self._compiled(source, target, segments)
