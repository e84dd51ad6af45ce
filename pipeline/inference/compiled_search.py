"""Loads the compiled search, and compares it with PyTorch's operators before it is kept."""

import ctypes
import sys

import torch
from torch import Tensor

from model.decoding import BeamSearch
from model.fast.compiled_search import SOURCES, CompiledSearch, load_library
from model.settings import NetworkSettings
from model.transformer import Transformer
from pipeline.runtime.compiled_code import Program, load_program

BEAM_SIZE, LENGTH_PENALTY, EXTRA_TOKENS = 3, 0.6, 6
_PAD, _BOS, _EOS, _VOCABULARY = 0, 2, 3, 600


def load_compiled_search() -> ctypes.CDLL | None:
    """Return the compiled search, and compile it first if that has not been done.

    Where that is not possible, say why in one line and return None: PyTorch's operators find the same translations.
    """
    try:
        return load_program(Program("search", SOURCES, load_library, agrees))
    except OSError as error:
        print(f"translating without the compiled search, which is slower: {error}", file=sys.stderr)
        return None


def agrees(library: ctypes.CDLL) -> bool:
    """Return whether both find the same translations with two small random networks."""
    return all(_agrees_on(library, *case) for case in agreement_cases())


@torch.no_grad()
def agreement_cases() -> list[tuple[Transformer, Tensor, list[int]]]:
    """Return networks, sources [B, S] and their lengths for which rounding cannot change any choice of the search."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)  # the other seeds up to 20 have choices between hypotheses that are nearly equal
        return [
            (_network(pre_norm), torch.randint(4, _VOCABULARY, (7, 9)), [9, 3, 7, 1, 5, 8, 2])
            for pre_norm in (False, True)
        ]


def _network(pre_norm: bool) -> Transformer:
    # Sizes that are no multiples of a vector, and a vocabulary of more than one chunk.
    settings = NetworkSettings(num_layers=2, d_model=36, d_ff=52, num_heads=3, d_k=10, d_v=14, pre_norm=pre_norm)
    network = Transformer(_VOCABULARY, settings).eval()
    network.embedding.weight.mul_(3)  # distributions that are far from uniform
    return network


def _agrees_on(library: ctypes.CDLL, network: Transformer, source: Tensor, lengths: list[int]) -> bool:
    mask = torch.arange(source.size(1)) < torch.tensor(lengths).unsqueeze(1)
    arguments = (source, mask, BEAM_SIZE, LENGTH_PENALTY, EXTRA_TOKENS, BEAM_SIZE)
    compiled = CompiledSearch(library, network, _BOS, _EOS, _PAD)
    compiled.max_tokens = 20  # so that sentences wait
    found = compiled.beam(*arguments)
    expected = BeamSearch(network, _BOS, _EOS, _PAD).eval().beam(*arguments)
    return torch.equal(found.tokens, expected.tokens) and torch.allclose(found.scores, expected.scores, atol=1e-3)
