"""The network's forward pass through torch.compile, once for all shapes.

Sentences vary in length and batches in size, so sizes have to be symbols from the first call on. On a CPU there are
two graphs, for batches with a source mask and without, and others of sentences past the table of sinusoids (1,024
tokens). On a GPU each of them is made up to four times, for lengths of source and target that are a multiple of 8, as
attention's kernels like them, or are not; and again where a size decides how Inductor fuses layer normalization's
backward pass. What runs here after all have been met compiles nothing.
"""

import torch
from torch import Tensor

from model.transformer import Transformer

_GRAPHS = 64
"""PyTorch ends a run that needs a ninth graph of one function."""


class CompiledForward:
    """Computes what `network(source, target, source_mask)` does.

    No module but a function beside one: the network keeps its parameters' names and scripts as it is. Its forward
    hooks do not run.
    """

    def __init__(self, network: Transformer, backend: str = "inductor") -> None:
        """Compiles at the first calls, each of which takes a minute or so with PyTorch's own `backend`."""
        torch._dynamo.config.recompile_limit = max(_GRAPHS, torch._dynamo.config.recompile_limit)
        self._network = network
        self._compiled = torch.compile(network.forward, fullgraph=True, backend=backend)

    def __call__(self, source: Tensor, target: Tensor, source_mask: Tensor | None) -> Tensor:
        """Ids [B, S] and [B, T], bool [B, S] or None -> decoder states [B, T, D]."""
        if 1 in (*source.shape, *target.shape):
            # The compiler takes a size of one for a constant: each place for it would be another graph.
            return self._network(source, target, source_mask)
        # Past the last learned position this raises here, and not in a graph.
        self._network.positions(0, max(source.size(1), target.size(1)))
        mark_dynamic(source, 0, 1)
        mark_dynamic(target, 0, 1)
        if source_mask is not None:
            mark_dynamic(source_mask, 0, 1)
        return self._compiled(source, target, source_mask)


def mark_dynamic(tensor: Tensor, *dimensions: int) -> None:
    """Tell the compiler that these sizes vary, also where two of them happen to be equal at first."""
    torch._dynamo.maybe_mark_dynamic(tensor, list(dimensions))
