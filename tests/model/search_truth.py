"""Networks for the tests of the search, and reference answers by teacher forcing and by a plain beam search.

The references are in float64. A search in float32 may be off by `tolerance` of its network, which is the same on each
processor, and may choose other tokens only where the reference decides by less than twice that.
"""

import copy
import ctypes
import math
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.decoding import BeamResult, BeamSearch
from model.fast.compiled_search import CompiledSearch
from model.settings import NetworkSettings
from model.transformer import PaddedTransformer, Transformer
from pipeline.runtime.backend_choice import load_compiled_search

Network = Transformer | PaddedTransformer
PAD, UNK, BOS, EOS = 0, 1, 2, 3
VOCABULARY_SIZE = 24
MOST = 0.6
"""The share of sentences whose reference must not depend on rounding."""
LENGTHS = [9, 4, 7, 1, 12, 2, 7, 5, 3, 10]
"""Source lengths of a batch whose sentences end at different steps."""
PREFIXES = [[], [5], [6, 7, 8], [UNK], [9, 9], [4, 5, 6, 7, 8], [10], [], [11, 12], [23] * 5]
"""A target prefix for each of them. One of an answer with four extra tokens leaves room for the end symbol only."""


@cache
def compiled_library() -> ctypes.CDLL:
    """Return the compiled search, made by this machine's compiler."""
    library = load_compiled_search()
    assert library is not None, "tests need a C++ compiler"
    return library


SEARCHES: dict[str, Callable[..., Any]] = {
    "operators": lambda network, *unk_id: BeamSearch(network, BOS, EOS, PAD, *unk_id).eval(),
    "compiled": lambda network, *unk_id: CompiledSearch(compiled_library(), network, BOS, EOS, PAD, *unk_id),
}
"""Both implementations of the search. They take a network, and the unknown symbol's id if it is not to be chosen."""
ENGINES = {**SEARCHES, "scripted": lambda *given: torch.jit.script(SEARCHES["operators"](*given))}
"""The same, and the first one in TorchScript."""


def make_network(
    seed: int, vocabulary_size: int = VOCABULARY_SIZE, sharpness: float = 2.0, **settings: object
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


fixed_network = cache(make_network)
"""`make_network` for tests that leave the weights as they are. Its truths, which take long, are computed once."""


def random_network() -> Transformer:
    """Return a random network, which amplifies rounding."""
    return fixed_network(3)


def trained_network(variant: str = "") -> Transformer:
    """Return a partly trained network that repeats its source and doubles pieces at random, so it is uncertain."""
    return _trained_network(variant)


@cache
def _trained_network(variant: str) -> Transformer:
    settings = {
        "": {},
        "pre-norm": {"pre_norm": True, "d_k": 6, "d_v": 10},
        "learned": {"learned_positions": True, "max_positions": 32},
        "biased": {"activation": "swish", "output_bias": True},
    }[variant]
    # In float64, so that rounding makes no other network on another processor.
    network = make_network(5, sharpness=1.0, num_layers=1, **settings).double()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    draws = random.Random(1)
    for _ in range(150):
        length = draws.randint(1, 10)
        source = torch.randint(4, VOCABULARY_SIZE, (32, length))
        doubled = [[piece for piece in row for _ in range(draws.choice([1, 1, 2]))] for row in source.tolist()]
        answers = [torch.tensor([BOS, *row, EOS]) for row in doubled]
        target = nn.utils.rnn.pad_sequence(answers, batch_first=True, padding_value=PAD)
        source = F.pad(source, [0, 1], value=EOS)
        logits = network.logits(PaddedTransformer(network)(source, target[:, :-1]))
        loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network.float()


def make_sources(lengths: list[int], vocabulary_size: int = VOCABULARY_SIZE, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Return random padded sources of these lengths, end symbols included, and their mask."""
    generator = torch.Generator().manual_seed(seed)
    source = torch.full((len(lengths), max(lengths)), PAD)
    for row, length in zip(source, lengths, strict=True):
        row[: length - 1] = torch.randint(4, vocabulary_size, (length - 1,), generator=generator)
        row[length - 1] = EOS
    return source, torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)


def padded_prefixes(prefixes: Sequence[Sequence[int]] = PREFIXES) -> Tensor:
    """Return the argument `target_prefix` of a search."""
    return nn.utils.rnn.pad_sequence([torch.tensor(one, dtype=torch.int64) for one in prefixes], True, PAD)


@cache
def exact(network: Network) -> PaddedTransformer:
    """Return a copy of a network, whose weights do not change any more, in float64."""
    padded = network if isinstance(network, PaddedTransformer) else PaddedTransformer(network)
    return copy.deepcopy(padded).double()


@cache
@torch.no_grad()
def tolerance(network: Network, precision: float = torch.finfo(torch.float32).eps) -> float:
    """Return how far a search in float32 may be off in an answer's log-probability.

    It is four times the largest change of several answers, found and arbitrary ones, in float64 if each layer's output
    is moved at random by float32's precision.
    """
    noisy, generator = copy.deepcopy(exact(network)), torch.Generator().manual_seed(0)

    def move(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        noise = 2 * torch.rand(output.shape, dtype=output.dtype, generator=generator) - 1
        return output + precision * output.abs().amax(-1, keepdim=True) * noise

    for module in noisy.modules():
        if not list(module.children()):
            module.register_forward_hook(move)
    changes = []
    for length in (3, 7, 10, 12):
        [source], _ = make_sources([length], noisy.network.vocabulary_size, seed=length)
        found = [answer for _, answer in plain_beam(network, source, 2, 0.6, length + 12).answers]
        for answer in [*found, [*source[:-1].tolist(), *source.tolist()]]:
            true = forced_log_probability(network, source, answer)
            changes += [abs(_log_probabilities(noisy, source, [answer])[0] - true) for _ in range(8)]
    return 4 * max(changes)


def forced_log_probabilities(network: Network, source: Tensor, answers: list[list[int]]) -> list[float]:
    """Return log P(answer | source) in float64 by teacher forcing, for answers of equal length and a source [S]."""
    return _log_probabilities(exact(network), source, answers)


@torch.no_grad()
def _log_probabilities(network: PaddedTransformer, source: Tensor, answers: list[list[int]]) -> list[float]:
    target = torch.tensor(answers)
    inputs = torch.cat([torch.full([len(answers), 1], BOS), target[:, :-1]], 1)
    states = network(source.expand(len(answers), -1), inputs)
    return network.logits(states).log_softmax(-1).gather(2, target.unsqueeze(2)).sum([1, 2]).tolist()


def forced_log_probability(network: Network, source: Tensor, answer: list[int]) -> float:
    return forced_log_probabilities(network, source, [answer])[0]


def penalized(log_probability: float, length: int, alpha: float) -> float:
    return log_probability / ((5 + length) / 6) ** alpha


class Reference(NamedTuple):
    answers: list[tuple[float, list[int]]]
    """Score and tokens, best first."""
    margin: float
    """The smallest difference on which a choice depended, of log-probabilities or of scores."""


def _gap(ranked: list[float], kept: int) -> float:
    """Return by how much the last of the first `kept` numbers is larger than the next one."""
    return ranked[kept - 1] - ranked[kept] if 0 < kept < len(ranked) else math.inf


@torch.no_grad()
def plain_beam(
    network: Network,
    source: Tensor,
    beam_size: int,
    alpha: float,
    limit: int,
    stops_at_first: bool = False,
    prefix: Sequence[int] = (),
) -> Reference:
    """Search one sentence as in section 6.1, without a cache, in float64, for answers that begin with `prefix`.

    It goes on to the limit, or if `stops_at_first` until beam_size hypotheses have ended; then only the beam_size most
    probable continuations may end.
    """
    network = exact(network)
    hypotheses: list[tuple[float, list[int]]] = [(0.0, [])]
    answers, gaps = [], []
    for length in range(1, limit + 1):
        prefixes = torch.tensor([[BOS, *pieces] for _, pieces in hypotheses])
        states = network(source.expand(len(hypotheses), -1), prefixes)[:, -1]
        steps = network.logits(states).log_softmax(-1)
        steps[:, [PAD, BOS]] = -math.inf
        if length == limit or length <= len(prefix):
            only = prefix[length - 1] if length <= len(prefix) else EOS
            steps[:, torch.arange(steps.size(1)) != only] = -math.inf
        values, tokens = (one.tolist() for one in steps.topk(min(2 * beam_size + 1, steps.size(1))))
        continuations = [
            (total + step, [*pieces, token])
            for (total, pieces), *row in zip(hypotheses, values, tokens, strict=True)
            for step, token in zip(*row, strict=True)
            if step > -math.inf
        ]
        continuations.sort(reverse=True)
        gaps.append(_gap([total for total, _ in continuations], 2 * beam_size))
        continuations = continuations[: 2 * beam_size]
        may_end = continuations[:beam_size] if stops_at_first else continuations
        if stops_at_first:
            gaps.append(_gap([total for total, _ in continuations], beam_size))
        answers += [(penalized(total, length, alpha), pieces) for total, pieces in may_end if pieces[-1] == EOS]
        if stops_at_first and len(answers) >= beam_size:
            break
        hypotheses = [(total, pieces) for total, pieces in continuations if pieces[-1] != EOS]
        gaps.append(_gap([total for total, _ in hypotheses], beam_size))
        hypotheses = hypotheses[:beam_size]
    answers.sort(reverse=True)
    scores = [score for score, _ in answers]
    gaps += [_gap(scores, rank) for rank in range(1, beam_size + 1)]
    return Reference(answers[:beam_size], min(gaps))


@cache
def references(
    network: Transformer, beam_size: int, alpha: float, extra: int, stops_at_first: bool = False, forced: bool = False
) -> list[Reference]:
    """Return the answers of `plain_beam` to the sources of `make_sources(LENGTHS)`; if `forced`, with PREFIXES."""
    source, _ = make_sources(LENGTHS, network.vocabulary_size)
    return [
        plain_beam(network, row[:length], beam_size, alpha, length + extra, stops_at_first, prefix if forced else ())
        for row, length, prefix in zip(source, LENGTHS, PREFIXES, strict=True)
    ]


def answers_of(found: BeamResult, sentence: int) -> list[tuple[float, list[int]]]:
    """Return (score, tokens) of each answer to a sentence, without padding."""
    return [
        (float(score), tokens[:length].tolist())
        for score, tokens, length in zip(
            found.scores[sentence], found.tokens[sentence], found.lengths[sentence].tolist(), strict=True
        )
    ]


def assert_finds(network: Network, found: BeamResult, expected: list[Reference]) -> None:
    """Check scores, and tokens where rounding cannot change a choice, which is so for most sentences."""
    allowed, num_decided = tolerance(network), 0
    for sentence, reference in enumerate(expected):
        answers = answers_of(found, sentence)
        if reference.margin <= 2 * allowed:
            continue
        num_decided += 1
        expected_answers = reference.answers[: len(answers)]
        assert [tokens for _, tokens in answers] == [tokens for _, tokens in expected_answers]
        assert [score for score, _ in answers] == pytest.approx([score for score, _ in expected_answers], abs=allowed)
    assert num_decided >= MOST * len(expected)
