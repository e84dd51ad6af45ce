"""How a run computes. `pipeline/runtime/backend_choice.py` chooses it once, from the recipe and the device.

The defaults are plain PyTorch, which runs everywhere and which every fast path of `model/fast/` is tested against.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from model.decoding import BeamSearch, GreedyResult
from model.loss import ChunkTerms
from model.packed_attention import PLAIN_ATTENTION, RowAttention, RowSentences
from model.transformer import Transformer

Forward = Callable[
    [tuple[Tensor, Tensor], tuple[Tensor, Tensor], tuple[RowSentences, RowSentences, RowSentences]], Tensor
]
"""The signature of `Transformer.rows`."""


class GreedySearch(Protocol):
    """The interface of a search that validation uses."""

    def greedy(self, source: Tensor, source_mask: Tensor | None, max_extra_tokens: int) -> GreedyResult:
        """Do what `BeamSearch.greedy` does."""
        ...


class Search(NamedTuple):
    """An implementation of greedy and beam search."""

    name: str
    function: Callable[[Transformer, int, int, int, int | None], GreedySearch]
    """Takes a network and the ids of the begin, end, padding and unknown symbols, as `BeamSearch` does. It may copy the
    weights: the result does not follow later changes of them."""


PYTORCH_SEARCH = Search("PyTorch", BeamSearch)


@dataclass(frozen=True)
class Backend:
    """The implementations that a run trains with. Each has the signature of the plain function that it stands for."""

    precision: str = "32-true"
    """Lightning's name."""
    attention: RowAttention = PLAIN_ATTENTION
    compiled: Callable[[Transformer], Forward] | None = None
    """Returns a compiled `Transformer.rows`; None to call it as it is. Validation is not compiled, and plain attention
    cannot be: groups of sentences differ in shape from step to step."""
    chunk_terms: ChunkTerms | None = None
    """Computes the loss of a chunk in training; None for PyTorch's operators."""
    search: Search = PYTORCH_SEARCH
    """What validation decodes with."""
    notes: tuple[str, ...] = ()
    """Why something slower was chosen than the device could run."""

    def summary(self) -> dict[str, str]:
        """Return what was chosen, by part, for the run folder."""
        return {
            "precision": self.precision,
            "attention": self.attention.name,
            "compilation": "Inductor" if self.compiled else "none",
            "search": self.search.name,
        }

    def line(self) -> str:
        """Return what was chosen in one line."""
        return "backend: " + ", ".join(f"{part} {choice}" for part, choice in self.summary().items())


def weights_cast_once(device: str) -> torch.autocast:
    """Return an autocast context that caches cast weights for all micro-batches of a step, or all tokens of a search.

    Lightning's own context around the step disables the cache, and clears it when the step ends. In a compiled network
    the cache has no effect: weights are cast for each micro-batch.
    """
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return torch.autocast(device, dtype, enabled=enabled, cache_enabled=True)
