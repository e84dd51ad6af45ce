"""Answers that begin with a target prefix; tests/model/test_sampling.py draws some."""

from typing import Any

import pytest
import torch

from model.decoding import BeamResult
from model.transformer import Transformer
from tests.model.search_truth import (
    LENGTHS,
    PREFIXES,
    answers_of,
    assert_finds,
    forced_log_probability,
    make_sources,
    padded_prefixes,
    penalized,
    references,
    tolerance,
    trained_network,
)
from tests.model.test_decoding import plain_greedy
from tests.model.test_sampling import ENGINES


def make_search(engine: str, *network: Transformer) -> Any:
    search = ENGINES[engine](*network)
    if engine == "compiled":
        search.max_tokens = 40  # so that sentences wait
    return search


@pytest.mark.parametrize("variant", ["", "learned"])
def test_equals_a_plain_search_and_scores_those_of_teacher_forcing(variant: str) -> None:
    """With beam and greedy search, by both rules; `plain_beam` knows no batch."""
    source, mask = make_sources(LENGTHS)
    network = trained_network(variant)
    sentences = [(row[:length], prefix) for row, length, prefix in zip(source, LENGTHS, PREFIXES, strict=True)]
    greedily = [plain_greedy(network, ids, len(ids) + 8, prefix) for ids, prefix in sentences]
    for engine in ENGINES:
        search = make_search(engine, network)
        for beam_size, alpha, extra, rule in ((4, 0.6, 5, "exact"), (3, 1.5, 12, "first")):
            found = search.beam(source, mask, beam_size, alpha, extra, beam_size, rule, padded_prefixes())
            assert_finds(network, found, references(network, beam_size, alpha, extra, rule == "first", forced=True))
            for number, (ids, prefix) in enumerate(sentences):
                answers = answers_of(found, number)
                assert answers == sorted(answers, key=lambda one: -one[0])
                assert len({tuple(tokens) for _, tokens in answers}) == beam_size
                for score, tokens in answers:
                    assert tokens[: len(prefix)] == prefix
                    total = forced_log_probability(network, ids, tokens)
                    assert score == pytest.approx(penalized(total, len(tokens), alpha), abs=tolerance(network))
        tokens, lengths, totals = search.greedy(source, mask, 8, padded_prefixes())
        found = BeamResult(*(one.unsqueeze(1) for one in (tokens, lengths, totals, totals)))
        assert_finds(network, found, greedily)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_empty_prefix_changes_no_bit(engine: str) -> None:
    source, mask = make_sources(LENGTHS)
    search = make_search(engine, trained_network())
    expected = search.beam(source, mask, 4, 0.6, 8, 4)
    for prefix in (padded_prefixes([[]] * len(LENGTHS)), torch.zeros(len(LENGTHS), 3, dtype=torch.int64)):
        found = search.beam(source, mask, 4, 0.6, 8, 4, "exact", prefix)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
