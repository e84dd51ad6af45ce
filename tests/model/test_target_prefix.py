"""Answers that begin with a target prefix; tests/model/test_sampling.py draws some."""

import itertools
from typing import Any

import pytest
import torch

from model.decoding import BeamResult
from tests.model.search_truth import (
    EOS,
    LENGTHS,
    PREFIXES,
    UNK,
    answers_of,
    assert_finds,
    forced_log_probabilities,
    forced_log_probability,
    make_network,
    make_sources,
    padded_prefixes,
    penalized,
    plain_beam,
    tolerance,
    trained_network,
)
from tests.model.test_decoding import assert_ranked, plain_greedy
from tests.model.test_sampling import ENGINES


def make_search(engine: str, *network: Any) -> Any:
    search = ENGINES[engine](*network)
    if engine == "compiled":
        search.max_tokens = 40  # so that sentences wait
    return search


@pytest.mark.parametrize("engine", ["operators", "compiled"])
def test_a_wide_beam_finds_the_best_answers_of_enumeration_that_begin_with_it(engine: str) -> None:
    prefixes, extra, beam_size = [[], [4], [5, UNK], [4] * 4], 2, 81
    source, mask = make_sources([3, 3, 2, 3], 6)
    for seed in range(2):
        network = make_network(seed, 6)
        found = make_search(engine, network).beam(
            source, mask, beam_size, 0.6, extra, beam_size, "exact", padded_prefixes(prefixes)
        )
        for sentence, prefix in enumerate(prefixes):
            ids = source[sentence][mask[sentence]]
            expected: list[tuple[float, list[int]]] = []
            for count in range(len(ids) + extra - len(prefix)):
                every = [[*prefix, *pieces, EOS] for pieces in itertools.product([UNK, 4, 5], repeat=count)]
                totals = forced_log_probabilities(network, ids, every)
                expected += [(penalized(total, len(one), 0.6), one) for total, one in zip(totals, every, strict=True)]
            assert_ranked(network, answers_of(found, sentence), sorted(expected, reverse=True))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("variant", ["", "learned"])
def test_equals_a_plain_search_and_scores_those_of_teacher_forcing(variant: str, engine: str) -> None:
    """With beam and greedy search, by both rules; `plain_beam` knows no batch."""
    source, mask = make_sources(LENGTHS)
    network = trained_network(variant)
    search = make_search(engine, network)
    sentences = [(row[:length], prefix) for row, length, prefix in zip(source, LENGTHS, PREFIXES, strict=True)]
    for beam_size, alpha, extra, rule in ((4, 0.6, 5, "exact"), (3, 1.5, 12, "first")):
        found = search.beam(source, mask, beam_size, alpha, extra, beam_size, rule, padded_prefixes())
        expected = [
            plain_beam(network, ids, beam_size, alpha, len(ids) + extra, rule == "first", prefix)
            for ids, prefix in sentences
        ]
        assert_finds(network, found, expected)
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
    assert_finds(network, found, [plain_greedy(network, ids, len(ids) + 8, prefix) for ids, prefix in sentences])


@pytest.mark.parametrize("engine", ENGINES)
def test_an_empty_prefix_changes_no_bit(engine: str) -> None:
    source, mask = make_sources(LENGTHS)
    search = make_search(engine, trained_network())
    expected = search.beam(source, mask, 4, 0.6, 8, 4)
    for prefix in (padded_prefixes([[]] * len(LENGTHS)), torch.zeros(len(LENGTHS), 3, dtype=torch.int64)):
        found = search.beam(source, mask, 4, 0.6, 8, 4, "exact", prefix)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
