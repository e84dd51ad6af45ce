"""The network's forward pass over packed micro-batches and the loss of a chunk, through torch.compile.

All micro-batches have rows of the same lengths and one number of sentences, so there is one graph of the network, and
one of the loss, or two if the last chunk is shorter.
"""

import torch
from torch import Tensor

from model.loss import ChunkTerms
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


def chunk_terms(logits: Tensor, target: Tensor, epsilon: float) -> Tensor:
    """Do what `loss._read_logits` does, for one pass with gradients, in terms that Inductor compiles to one kernel.

    It reads the logits twice and writes them once. PyTorch's operators, which are faster uncompiled, have a `gather`
    and a `scatter_add_`, which would be kernels of their own.

    Args:
        logits: [N, V], overwritten by d loss / d logits without its term -epsilon / V.
        target: int64 [N, 1].
        epsilon: the label smoothing.

    Returns:
        [3, N, 1]: the largest logit, the target's logit, and the probability of the most probable class.
    """
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    largest = x.amax(-1, keepdim=True)
    exponentials = (x - largest).exp()
    probability = 1.0 / exponentials.sum(-1, keepdim=True)
    is_target = torch.arange(x.size(1), device=x.device) == target
    target_logits = torch.where(is_target, x, 0.0).sum(-1, keepdim=True)
    probabilities = exponentials * probability
    logits.copy_(torch.where(is_target, probabilities - (1.0 - epsilon), probabilities))
    return torch.stack([largest, target_logits, probability])


def compiled_chunk_terms(backend: str = "inductor") -> ChunkTerms:
    """Return the compiled `chunk_terms`."""
    return torch.compile(chunk_terms, fullgraph=True, backend=backend)
