"""The search against enumeration, teacher forcing, and a plain beam search without cache, batch or early stopping."""

import copy
import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model.beyond.sampling import Sampling
from model.decoding import BeamResult, BeamSearch, penalty
from model.transformer import Cache, PaddedTransformer, Transformer
from tests.model.search_truth import (
    BOS,
    ENGINES,
    EOS,
    LENGTHS,
    PAD,
    PREFIXES,
    SEARCHES,
    UNK,
    Reference,
    answers_of,
    assert_finds,
    exact,
    fixed_network,
    forced_log_probabilities,
    forced_log_probability,
    make_network,
    make_sources,
    padded_prefixes,
    penalized,
    random_network,
    references,
    tolerance,
    trained_network,
)


def assert_ranked(
    network: Transformer, found: list[tuple[float, list[int]]], expected: list[tuple[float, list[int]]]
) -> None:
    """Check the best of all answers there are. Two may change places if rounding can change which is better."""
    answers = [(score, tokens) for score, tokens in found if score > -math.inf]
    assert len(answers) == min(len(expected), len(found))
    assert len({tuple(tokens) for _, tokens in answers}) == len(answers)
    scores, allowed = {tuple(tokens): score for score, tokens in expected}, tolerance(network)
    for (score, tokens), (expected_score, _) in zip(answers, expected, strict=False):
        assert score == pytest.approx(scores[tuple(tokens)], abs=allowed)
        assert score == pytest.approx(expected_score, abs=allowed)


@pytest.mark.parametrize("prefixes", [[[]] * 4, [[], [4], [5, UNK], [4] * 4]], ids=["free", "behind prefixes"])
def test_a_wide_beam_finds_what_enumeration_finds(prefixes: list[list[int]]) -> None:
    # Three pieces and the end symbol give 121 answers of up to 4 pieces, and at most 81 open hypotheses.
    vocabulary_size, beam_size, extra, alphas = 6, 81, 2, (0.6, 1.5)
    source, mask = make_sources([3, 3, 2, 3], vocabulary_size)
    target_prefix = padded_prefixes(prefixes) if any(prefixes) else None
    greedy_is_best, penalty_matters, lengths = [], [], set()
    for seed in range(3):
        network = fixed_network(seed, vocabulary_size)
        searches = [make(network) for make in SEARCHES.values()]
        greedy = searches[0].greedy(source, mask, extra, target_prefix)
        found = {
            alpha: [
                one.beam(source, mask, beam_size, alpha, extra, beam_size, "exact", target_prefix) for one in searches
            ]
            for alpha in alphas
        }
        for sentence, (source_length, prefix) in enumerate(zip(mask.sum(1).tolist(), prefixes, strict=True)):
            ids = source[sentence, :source_length]
            totals: list[tuple[float, list[int]]] = []
            for count in range(source_length + extra - len(prefix)):
                every = [[*prefix, *pieces, EOS] for pieces in itertools.product([UNK, 4, 5], repeat=count)]
                totals += zip(forced_log_probabilities(network, ids, every), every, strict=True)
            for alpha, results in found.items():
                expected = sorted(((penalized(t, len(a), alpha), a) for t, a in totals), reverse=True)
                for one in results:
                    assert_ranked(network, answers_of(one, sentence), expected)
                best = expected[0][1]
                lengths.add(len(best))
                greedy_is_best.append(greedy.tokens[sentence, : greedy.lengths[sentence]].tolist() == best)
                penalty_matters.append(max(totals)[1] != best)
    assert False in greedy_is_best
    assert True in penalty_matters
    assert len(lengths) >= 3


def test_the_length_penalty_by_hand() -> None:
    # ((5 + 7) / 6) ** 0.6 = 2 ** 0.6 = 1.5157166; ((5 + 1) / 6) ** 0.6 = 1; ((5 + 13) / 6) ** 1 = 3.
    assert penalty(torch.tensor([7, 1]), 0.6).tolist() == pytest.approx([1.5157166, 1.0], rel=1e-6)
    assert penalty(torch.tensor([13]), 1.0).tolist() == [3.0]
    # An answer of length 7 with log-probability -3 scores -3 / 2 ** 0.6 = -1.979 and beats one of length 1 with -2.
    assert penalized(-3.0, 7, 0.6) == pytest.approx(-3 / 2**0.6, rel=1e-12)


@pytest.mark.parametrize("engine", SEARCHES)
def test_answers_that_do_not_exist_are_empty(engine: str) -> None:
    source, _ = make_sources([1], 6)
    found = SEARCHES[engine](make_network(0, 6)).beam(source, None, 8, 0.6, 1, 8)
    # The answers with at most one piece: [], [unk], [4], [5].
    assert found.lengths.tolist()[0][4:] == [0] * 4
    assert sorted(found.lengths.tolist()[0][:4]) == [1, 2, 2, 2]
    assert found.scores[0, 4:].tolist() == [-math.inf] * 4
    assert (found.tokens[0, 4:] == PAD).all()


@pytest.mark.parametrize("engine", SEARCHES)
@pytest.mark.parametrize("variant", ["", "pre-norm", "learned", "random"])
def test_equals_a_plain_beam_search_without_cache_batch_or_early_stop(variant: str, engine: str) -> None:
    """By both rules. A large length penalty lets answers win at their limit which would not at their length."""
    source, mask = make_sources(LENGTHS)
    network = random_network() if variant == "random" else trained_network(variant)
    search, lengths = SEARCHES[engine](network), set()
    large = 1.5 if variant == "random" else 3.0
    for beam_size, n_best, alpha, extra in [(4, 4, 0.6, 8), (2, 2, 0.0, 4), (4, 1, large, 12)]:
        expected = references(network, beam_size, alpha, extra)
        assert_finds(network, search.beam(source, mask, beam_size, alpha, extra, n_best), expected)
        lengths |= {len(one.answers[0][1]) for one in expected}
    assert len(lengths) >= 4
    for beam_size, alpha, extra in [(4, 0.6, 8), (3, 1.5, 4)]:
        expected = references(network, beam_size, alpha, extra, True)
        assert_finds(network, search.beam(source, mask, beam_size, alpha, extra, beam_size, "first"), expected)
    assert references(network, 4, 0.6, 8, True) != references(network, 4, 0.6, 8)


@torch.no_grad()
def plain_greedy(network: Transformer, source: Tensor, limit: int, prefix: Sequence[int] = ()) -> Reference:
    """Append the most probable token to a prefix in float64, without a cache. The score is the log-probability."""
    total, answer, margin = 0.0, [], math.inf
    while not answer or answer[-1] != EOS:
        states = exact(network)(source.unsqueeze(0), torch.tensor([[BOS, *answer]]))
        steps = exact(network).logits(states[0, -1]).log_softmax(-1)
        steps[[PAD, BOS]] = -math.inf
        (best, second), (token, _) = steps.topk(2)
        if forced := prefix[len(answer) : len(answer) + 1] or [EOS] * (len(answer) == limit - 1):
            best, token = steps[forced[0]], torch.tensor(forced[0])
        else:
            margin = min(margin, float(best - second))
        answer.append(int(token))
        total += float(best)
    return Reference([(total, answer)], margin)


def test_a_beam_of_one_is_greedy() -> None:
    extra, lengths = 8, set()
    source, mask = make_sources(LENGTHS)
    for network in (fixed_network(0), random_network(), trained_network("learned")):
        expected = [plain_greedy(network, row[:n], n + extra) for row, n in zip(source, LENGTHS, strict=True)]
        for make in SEARCHES.values():
            search = make(network)
            greedy, beam = search.greedy(source, mask, extra), search.beam(source, mask, 1, 0.6, extra, 1)
            assert torch.equal(greedy.tokens, beam.tokens[:, 0])
            assert torch.equal(greedy.log_probabilities, beam.log_probabilities[:, 0])
            assert_finds(network, beam._replace(scores=beam.log_probabilities), expected)
            for row, length in zip(greedy.tokens, greedy.lengths.tolist(), strict=True):
                assert (row[length - 1], row[length:].tolist()) == (EOS, [PAD] * (len(row) - length))
                lengths.add(length)
            penalties = [penalized(1.0, length, 0.6) for length in greedy.lengths.tolist()]
            torch.testing.assert_close(beam.scores[:, 0], greedy.log_probabilities * torch.tensor(penalties))
    assert len(lengths) >= 6


class Observed(PaddedTransformer):
    """Records how many sentences each step decodes. If `endless`, the end symbol is nearly impossible."""

    batch_sizes: list[int]
    endless: bool

    def step(self, last: Tensor, *others: object) -> tuple[Tensor, Cache]:
        self.batch_sizes.append(last.size(0))
        return super().step(last, *others)

    def logits(self, states: Tensor) -> Tensor:
        logits = super().logits(states)
        if self.endless:
            logits[..., EOS] -= 100.0
        return logits


def observed(network: Transformer, endless: bool = False) -> tuple[BeamSearch, Observed]:
    search, padded = BeamSearch(network, BOS, EOS, PAD).eval(), Observed(network)
    padded.batch_sizes, padded.endless = [], endless
    search.network = padded
    return search, padded


def test_finished_sentences_leave_the_batch_and_the_search_stops_early() -> None:
    source, mask = make_sources(LENGTHS)
    search, network = observed(trained_network())
    search.beam(source, mask, 4, 0.6, 50, 1)
    sizes = network.batch_sizes
    assert len(sizes) < max(LENGTHS) + 25
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == len(LENGTHS)
    assert sizes[-1] < len(LENGTHS) // 2


class Chain(PaddedTransformer):
    """Piece w follows piece v with probability `probabilities[v, w]`, for any source."""

    probabilities: Tensor
    num_steps: int

    def step(self, last: Tensor, *others: object) -> tuple[Tensor, Cache]:
        self.num_steps += 1
        return F.one_hot(last, self.network.vocabulary_size).double(), []

    def logits(self, states: Tensor) -> Tensor:
        return (states @ self.probabilities).log()


@pytest.mark.parametrize(
    ("probability_of_none", "expected", "num_steps"), [(0.52, [4, 5, 6, EOS], 4), (0.55, [EOS], 1)]
)
def test_the_search_stops_when_no_hypothesis_can_win_and_no_earlier(
    probability_of_none: float, expected: list[int], num_steps: int
) -> None:
    """After step 1 there are an answer without pieces and a hypothesis that can only end at its limit, 4 tokens.

    The log-probability of the hypothesis is ln 0.4 = -0.9163. Divided by the penalty of 4 tokens, (5 + 4) / 6, this is
    -0.6109; with 3 tokens it would be -0.6872 and with 5 tokens -0.5498. The penalty of the answer without pieces is 1,
    so its score is worse if its probability is 0.52 (-0.6539), and better if it is 0.55 (-0.5978).
    """
    search = BeamSearch(make_network(0, 8), BOS, EOS, PAD).eval()
    search.network = network = Chain(make_network(0, 8))
    network.probabilities, network.num_steps = torch.full([8, 8], 1e-9, dtype=torch.float64), 0
    network.probabilities[BOS, EOS], network.probabilities[BOS, 4] = probability_of_none, 0.4
    # The remaining probability goes to a piece that only itself follows.
    network.probabilities[BOS, 7] = 1.0 - 0.4 - probability_of_none
    for piece, following in [(4, 5), (5, 6), (6, EOS), (7, 7)]:
        network.probabilities[piece, following] = 1.0
    source, _ = make_sources([2], 8)
    for beam_size in (2, 4):
        network.num_steps = 0
        found = search.beam(source, None, beam_size, 1.0, 2, 1)
        [(_, tokens)] = answers_of(found, 0)
        assert tokens == expected
        assert network.num_steps == num_steps


@pytest.mark.parametrize("beam_size", [1, 4])
def test_each_sentence_has_its_own_limit(beam_size: int) -> None:
    source, mask = make_sources(LENGTHS)
    search, network = observed(fixed_network(0), endless=True)
    found = search.beam(source, mask, beam_size, 0.6, 5, beam_size)
    assert found.lengths.tolist() == [[length + 5] * beam_size for length in LENGTHS]
    assert (found.tokens == EOS).sum(-1).eq(1).all()
    total, (_, tokens) = float(found.log_probabilities[0, 0]), answers_of(found, 0)[0]
    assert total == pytest.approx(forced_log_probability(network, source[0, :9], tokens), abs=tolerance(network))
    assert total < -90


@pytest.mark.parametrize("limit", [1, 8])
def test_learned_positions_limit_source_and_answer(limit: int) -> None:
    search, _ = observed(make_network(0, learned_positions=True, max_positions=limit), endless=True)
    source, _ = make_sources([limit])
    assert search.greedy(source, None, 50).lengths.tolist() == [limit]
    # By the first rule too, where fewer answers than the beam exist.
    found = search.beam(source, None, 4, 0.6, 50, 4, "first")
    assert found.lengths.tolist() == [[limit] + [0 if limit == 1 else limit] * 3]
    longer, _ = make_sources([limit + 1])
    compiled = SEARCHES["compiled"](search.network.network)
    assert int(compiled.greedy(source, None, 50).lengths) <= limit
    for one in (search, compiled):
        with pytest.raises(ValueError, match=f"{limit + 1} tokens is longer than the network's {limit} positions"):
            one.greedy(longer, None, 50)


def test_bfloat16_finds_answers_as_good() -> None:
    source, mask = make_sources(LENGTHS)
    equal, variants = 0, ["", "pre-norm", "learned"]
    for network in map(trained_network, variants):
        rounded = copy.deepcopy(network).bfloat16()
        found = BeamSearch(rounded, BOS, EOS, PAD).eval().beam(source, mask, 4, 0.6, 8, 1)
        expected = references(network, 4, 0.6, 8)
        assert found.scores.dtype == torch.float32
        for sentence, length in enumerate(LENGTHS):
            _, tokens = answers_of(found, sentence)[0]
            best_score, best = expected[sentence].answers[0]
            equal += tokens == best
            # In float64, bfloat16's answer scores nearly as well as the best.
            score = penalized(forced_log_probability(network, source[sentence, :length], tokens), len(tokens), 0.6)
            assert score == pytest.approx(best_score, abs=0.1)
            assert float(found.scores[sentence, 0]) == pytest.approx(score, abs=0.1)
    assert equal >= 0.9 * len(variants) * len(LENGTHS)


def search_where_sentences_wait(engine: str, network: Transformer) -> Any:
    search = ENGINES[engine](network)
    if engine == "compiled":
        search.max_tokens = 40
    return search


@pytest.mark.parametrize("variant", ["", "learned"])
def test_behind_prefixes_equals_a_plain_search_and_scores_those_of_teacher_forcing(variant: str) -> None:
    """With beam and greedy search, by both rules; `plain_beam` knows no batch."""
    source, mask = make_sources(LENGTHS)
    network = trained_network(variant)
    sentences = [(row[:length], prefix) for row, length, prefix in zip(source, LENGTHS, PREFIXES, strict=True)]
    greedily = [plain_greedy(network, ids, len(ids) + 8, prefix) for ids, prefix in sentences]
    for engine in ENGINES:
        search = search_where_sentences_wait(engine, network)
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
    search = search_where_sentences_wait(engine, trained_network())
    expected = search.beam(source, mask, 4, 0.6, 8, 4)
    for prefix in (padded_prefixes([[]] * len(LENGTHS)), torch.zeros(len(LENGTHS), 3, dtype=torch.int64)):
        found = search.beam(source, mask, 4, 0.6, 8, 4, "exact", prefix)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


SOURCE = torch.tensor([[4, 5, EOS]])
MASK = torch.ones(1, 3, dtype=torch.bool)


def with_prefix(prefix: Sequence[object]) -> tuple[object, ...]:
    return SOURCE, None, 4, 0.6, 5, 1, "exact", torch.tensor(prefix)


BAD_ARGUMENTS = {
    "one or more of each": (SOURCE[:0], None, 4, 0.6, 5, 1),
    r"not .*\[1, 0\]": (SOURCE[:, :0], None, 4, 0.6, 5, 1),
    r"not .*\[1, 1, 3\]": (SOURCE[None], None, 4, 0.6, 5, 1),
    "must be int64": (SOURCE.float(), None, 4, 0.6, 5, 1),
    "ids must be 0 .. 23": (SOURCE + 19, None, 4, 0.6, 5, 1),
    "must be 0 .. 23": (-SOURCE, None, 4, 0.6, 5, 1),
    "must be bool of shape": (SOURCE, MASK[:, :2], 4, 0.6, 5, 1),
    "must be bool": (SOURCE, MASK.int(), 4, 0.6, 5, 1),
    "without any token": (SOURCE.repeat(2, 1), torch.cat([MASK, ~MASK]), 4, 0.6, 5, 1),
    "beam_size 0 must be": (SOURCE, None, 0, 0.6, 5, 1),
    "n_best 5 must be 1 .. beam_size 4": (SOURCE, None, 4, 0.6, 5, 5),
    "n_best 0 must be": (SOURCE, None, 4, 0.6, 5, 0),
    "length_penalty -0.5 must be": (SOURCE, None, 4, -0.5, 5, 1),
    "length_penalty inf must be": (SOURCE, None, 4, math.inf, 5, 1),
    "length_penalty nan must be": (SOURCE, None, 4, math.nan, 5, 1),
    "max_extra_tokens -1 must be": (SOURCE, None, 4, 0.6, -1, 1),
    "stop_rule last must be exact or first": (SOURCE, None, 4, 0.6, 5, 1, "last"),
    r"target_prefix must be int64 of shape \[1, tokens\], not .*\[2, 1\]": with_prefix([[4], [4]]),
    "target_prefix must be int64 of shape": with_prefix([[4.0]]),
    "target_prefix must be int64": with_prefix([4]),
    "target_prefix must be ids of pieces, 0 .. 23": with_prefix([[24]]),
    "must be ids of pieces, .* behind them": with_prefix([[-1]]),
    "must be ids of pieces, .* padding": with_prefix([[4, PAD, 4]]),
    "ids of pieces, .* padding": with_prefix([[BOS]]),
    "of pieces, .* padding": with_prefix([[4, EOS]]),
    "target_prefix is as long as an answer may be": with_prefix([[4] * 8]),
}


def test_wrong_arguments_are_refused_in_python_torchscript_and_the_compiled_search() -> None:
    searches = [make(make_network(0)) for make in SEARCHES.values()]
    scripted = torch.jit.script(searches[0])
    for message, arguments in BAD_ARGUMENTS.items():
        for search in searches:
            with pytest.raises(ValueError, match=message):
                search.beam(*arguments)
        with pytest.raises(torch.jit.Error, match=message):
            scripted.beam(*arguments)
    for one in (*searches, scripted):  # the smallest valid arguments
        assert one.beam(SOURCE, None, 1, 0.0, 0, 1).lengths.item() <= 3


@pytest.mark.parametrize("ids", [(2, 2, 0), (2, 3, 24), (-1, 3, 0), (2, 3, 0, 3), (2, 3, 0, 24)])
def test_wrong_special_ids_are_refused(ids: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must be different ids below 24"):
        BeamSearch(make_network(0), *ids)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_unknown_symbol_is_never_chosen(engine: str) -> None:
    """Nor is its probability given to others: a score is what teacher forcing computes."""
    network = fixed_network(1, 6)
    source, mask = make_sources([3, 3, 2, 3], 6)
    arguments, sampling = (source, mask, 4, 0.6, 3, 4), (1.0, None, 1.0, 1)
    free, found = (make(network).beam(*arguments) for make in (ENGINES[engine], lambda one: ENGINES[engine](one, UNK)))
    assert (free.tokens == UNK).any()
    lines = torch.arange(len(source))
    if engine != "scripted":
        sampling = Sampling(*sampling)
    drawn = ENGINES[engine](network, UNK).sample(source, mask, lines, sampling, 3)
    assert not torch.cat([found.tokens.flatten(), drawn.tokens.flatten()]).eq(UNK).any()
    for sentence, length in enumerate(mask.sum(1).tolist()):
        for score, tokens in answers_of(found, sentence):
            true = forced_log_probability(network, source[sentence, :length], tokens)
            assert score == pytest.approx(penalized(true, len(tokens), 0.6), abs=tolerance(network))
    with pytest.raises((ValueError, torch.jit.Error), match="must be ids of pieces"):
        ENGINES[engine](network, UNK).beam(*arguments, "exact", padded_prefixes([[], [UNK], [], []]))
