"""Networks for the tests of the search, and reference answers by teacher forcing and by a plain beam search."""

import ctypes
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.compiled_search import CompiledSearch
from model.decoding import BeamResult, BeamSearch
from model.settings import NetworkSettings
from model.transformer import Transformer
from pipeline.inference.compiled_search import load_compiled_search

PAD, UNK, BOS, EOS = 0, 1, 2, 3
TIE = 1e-5
VOCABULARY_SIZE = 24
LENGTHS = [9, 4, 7, 1, 12, 2, 7, 5, 3, 10]
"""Source lengths of a batch whose sentences end at different steps."""


@cache
def compiled_library() -> ctypes.CDLL:
    """Return the compiled search, made by this machine's compiler."""
    library = load_compiled_search()
    assert library is not None, "tests need a C++ compiler"
    return library


SEARCHES: dict[str, Callable[[Transformer], Any]] = {
    "operators": lambda network: BeamSearch(network, BOS, EOS, PAD).eval(),
    "compiled": lambda network: CompiledSearch(compiled_library(), network, BOS, EOS, PAD),
}
"""Both implementations of the search."""


def make_network(
    seed: int, vocabulary_size: int = VOCABULARY_SIZE, sharpness: float = 2.0, **settings: Any
) -> Transformer:
    """Return a random network whose distributions are far from uniform."""
    torch.manual_seed(seed)
    shape = {"num_layers": 2, "d_model": 16, "d_ff": 32, "num_heads": 2, "dropout": 0.1} | settings
    network = Transformer(vocabulary_size, NetworkSettings(**shape)).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() == 2:
                parameter *= sharpness
    return network


def trained_network(variant: str = "") -> Transformer:
    """Return a partly trained network that repeats its source and doubles pieces at random, so it is uncertain."""
    return _trained_network(variant)


@cache
def _trained_network(variant: str) -> Transformer:
    settings = {
        "": {},
        "pre-norm": {"pre_norm": True, "d_k": 6, "d_v": 10},
        "learned": {"learned_positions": True, "max_positions": 32},
    }[variant]
    network = make_network(5, sharpness=1.0, num_layers=1, **settings)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    draws = random.Random(1)
    for _ in range(150):
        length = draws.randint(1, 10)
        source = torch.randint(4, VOCABULARY_SIZE, (32, length))
        doubled = [[piece for piece in row for _ in range(draws.choice([1, 1, 2]))] for row in source.tolist()]
        answers = [torch.tensor([BOS, *row, EOS]) for row in doubled]
        target = nn.utils.rnn.pad_sequence(answers, batch_first=True, padding_value=PAD)
        source = F.pad(source, [0, 1], value=EOS)
        logits = network.logits(network(source, target[:, :-1]))
        loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network


def make_sources(lengths: list[int], vocabulary_size: int = VOCABULARY_SIZE, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Return random padded sources of these lengths, end symbols included, and their mask."""
    generator = torch.Generator().manual_seed(seed)
    source = torch.full((len(lengths), max(lengths)), PAD)
    for row, length in zip(source, lengths, strict=True):
        row[: length - 1] = torch.randint(4, vocabulary_size, (length - 1,), generator=generator)
        row[length - 1] = EOS
    return source, torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)


@torch.no_grad()
def forced_log_probabilities(network: Transformer, source: Tensor, answers: list[list[int]]) -> list[float]:
    """Return log P(answer | source) by teacher forcing, for answers of equal length and an unpadded source [S]."""
    target = torch.tensor(answers)
    inputs = torch.cat([torch.full([len(answers), 1], BOS), target[:, :-1]], 1)
    states = network(source.expand(len(answers), -1), inputs)
    steps = network.logits(states).double().log_softmax(-1)
    return steps.gather(2, target.unsqueeze(2)).sum([1, 2]).tolist()


def forced_log_probability(network: Transformer, source: Tensor, answer: list[int]) -> float:
    """Return log P(answer | source) of one answer."""
    return forced_log_probabilities(network, source, [answer])[0]


def penalized(log_probability: float, length: int, alpha: float) -> float:
    return log_probability / ((5 + length) / 6) ** alpha


@torch.no_grad()
def plain_beam(
    network: Transformer, source: Tensor, beam_size: int, alpha: float, limit: int, stops_at_first: bool = False
) -> list[tuple[float, list[int]]]:
    """Search one sentence as in section 6.1, without a cache.

    It goes on to the limit, or if `stops_at_first` until beam_size hypotheses have ended; then only the beam_size most
    probable continuations may end.
    """
    hypotheses: list[tuple[float, list[int]]] = [(0.0, [])]
    answers = []
    for length in range(1, limit + 1):
        prefixes = torch.tensor([[BOS, *pieces] for _, pieces in hypotheses])
        states = network(source.expand(len(hypotheses), -1), prefixes)[:, -1]
        steps = network.logits(states).log_softmax(-1).tolist()
        continuations = [
            (total + step, [*pieces, token])
            for (total, pieces), row in zip(hypotheses, steps, strict=True)
            for token, step in enumerate(row)
            if token not in (PAD, BOS) and (length < limit or token == EOS)
        ]
        continuations = sorted(continuations, reverse=True)[: 2 * beam_size]
        may_end = continuations[:beam_size] if stops_at_first else continuations
        answers += [(penalized(total, length, alpha), pieces) for total, pieces in may_end if pieces[-1] == EOS]
        if stops_at_first and len(answers) >= beam_size:
            break
        hypotheses = [(total, pieces) for total, pieces in continuations if pieces[-1] != EOS][:beam_size]
    return sorted(answers, reverse=True)


def answers_of(found: BeamResult, sentence: int) -> list[tuple[float, list[int]]]:
    """Return (score, tokens) of each answer to a sentence, without padding."""
    return [
        (float(score), tokens[:length].tolist())
        for score, tokens, length in zip(
            found.scores[sentence], found.tokens[sentence], found.lengths[sentence].tolist(), strict=True
        )
    ]


def count_ties(found: list[tuple[float, list[int]]], expected: list[tuple[float, list[int]]]) -> int:
    """Count the places that hold another answer of equal score. Fail on any other difference."""
    ties = 0
    expected_scores = {tuple(tokens): score for score, tokens in expected}
    for (score, tokens), (expected_score, expected_tokens) in zip(found, expected, strict=False):
        assert score == pytest.approx(expected_score, abs=1e-4)
        if tokens != expected_tokens:
            assert expected_scores[tuple(tokens)] == pytest.approx(expected_score, abs=TIE)
            ties += 1
    return ties
