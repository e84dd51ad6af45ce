"""The network's forward pass over packed micro-batches through torch.compile.

All micro-batches have rows of the same lengths and one number of sentences, so there is one graph.
"""

import torch
from torch import Tensor

from model.packed_attention import RowSentences
from model.transformer import Transformer


class CompiledForward:
    """Compiled `network.rows`, for an attention that is a kernel.

    This is not a module, so the network keeps its parameter names and can be scripted. The network's forward hooks
    are not called.
    """

    def __init__(self, network: Transformer, backend: str = "inductor") -> None:
        """Prepare compilation, which happens in the first call and takes about a minute with Inductor."""
        self._network = network
        self._compiled = torch.compile(network.rows, fullgraph=True, backend=backend)

    def __call__(
        self,
        source: tuple[Tensor, Tensor],
        target: tuple[Tensor, Tensor],
        sentences: tuple[RowSentences, RowSentences, RowSentences],
    ) -> Tensor:
        """Return decoder states [M, D]; see `Transformer.rows`."""
        # Raise for positions that are too large here, not inside a graph.
        self._network.positions(0, sentences[0].longest)
        return self._compiled(source, target, sentences)
