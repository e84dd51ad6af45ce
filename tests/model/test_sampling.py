"""Samples against the enumerated distribution, and against a plain sampler in float64 without cache or batch."""

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

from model.beyond.sampling import Sampling, choose, draw_uniforms, split_mix
from model.decoding import BeamResult
from model.transformer import Transformer
from tests.model.search_truth import (
    BOS,
    ENGINES,
    EOS,
    LENGTHS,
    PAD,
    PREFIXES,
    SEARCHES,
    UNK,
    answers_of,
    exact,
    fixed_network,
    make_network,
    make_sources,
    padded_prefixes,
    penalized,
    tolerance,
    trained_network,
)

SETTINGS = [
    Sampling(),
    Sampling(temperature=0.6, seed=1),
    Sampling(temperature=1.7, top_k=2),
    Sampling(top_p=0.7, seed=2),
    Sampling(temperature=1.3, top_k=3, top_p=0.8),
]


def most_probable(probabilities: Sequence[float], sampling: Sampling) -> tuple[list[float], float]:
    """Return the distribution that tokens are drawn from, and the smallest difference on which a cut depended."""
    ranked = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])
    sharpened = [one ** (1 / sampling.temperature) for one in probabilities]
    gaps = []
    if sampling.top_k is not None and sampling.top_k < len(ranked):
        gaps.append(probabilities[ranked[sampling.top_k - 1]] - probabilities[ranked[sampling.top_k]])
        ranked = ranked[: sampling.top_k]
    total, kept, mass = sum(sharpened[token] for token in ranked), [], 0.0
    for token in ranked:
        if sampling.top_p < 1.0:
            gaps.append(abs(mass / total - sampling.top_p))
        if mass < sampling.top_p * total:
            kept.append(token)
            mass += sharpened[token]
    return [sharpened[token] / mass if token in kept else 0.0 for token in range(len(sharpened))], min(
        gaps, default=1.0
    )


def plain_draw(weights: Sequence[float], uniforms: Sequence[float]) -> tuple[int, float]:
    """Return a token drawn in three steps, and how near a random number was to where another one would be drawn."""
    first, end, margin = 0, len(weights), 1.0
    for size, uniform in zip((1024, 32, 1), uniforms, strict=True):
        sums = list(itertools.accumulate(sum(weights[i : min(i + size, end)]) for i in range(first, end, size)))
        margin = min([margin, *(abs(border / sums[-1] - uniform) for border in sums)])
        first += size * next(i for i, one in enumerate(sums) if one > uniform * sums[-1])
        end = min(first + size, end)
    return first, margin


def next_probabilities(network: Transformer, source: Tensor, pieces: Sequence[int]) -> list[float]:
    """Return the network's probability of each token behind `pieces`, in float64."""
    return _next_probabilities(network, tuple(source.tolist()), tuple(pieces))


@cache
@torch.no_grad()
def _next_probabilities(network: Transformer, source: tuple[int, ...], pieces: tuple[int, ...]) -> list[float]:
    padded = exact(network)
    states = padded(torch.tensor([source]), torch.tensor([[BOS, *pieces]]))[0, -1]
    return padded.logits(states).softmax(-1).tolist()


def allowed(probabilities: list[float]) -> list[float]:
    return [0.0 if token in (PAD, BOS) else one for token, one in enumerate(probabilities)]


def assert_distributed(found: Sequence[object], expected: Mapping[Hashable, float]) -> None:
    """Check a sample by Pearson's chi-square test; a right one fails once in a thousand times."""
    counts, number = Counter(found), len(found)
    assert set(counts) <= {value for value, probability in expected.items() if probability > 0}
    assert sum(expected.values()) == pytest.approx(1.0, abs=1e-9)
    cells = [(counts[value], number * probability) for value, probability in expected.items()]
    common = [cell for cell in cells if cell[1] >= 5]
    rest = number - sum(count for count, _ in common), number - sum(wanted for _, wanted in common)
    common += [rest] if rest[1] >= 5 else []
    statistic, freedom = sum((count - wanted) ** 2 / wanted for count, wanted in common), len(common) - 1
    # Wilson and Hilferty's approximation of the quantile.
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3


def answers(found: BeamResult) -> list[tuple[int, ...]]:
    return [tuple(answers_of(found, sentence)[0][1]) for sentence in range(found.tokens.size(0))]


def test_whole_answers_have_the_distribution_of_enumeration() -> None:
    # Three pieces and the end symbol give 40 answers of up to 3 pieces. The last step has no choice but the end.
    network, limit, number = make_network(2, 6, sharpness=1.2), 4, 5000
    source, _ = make_sources([2], 6)
    for sampling in SETTINGS:
        expected: dict[tuple[int, ...], float] = {}
        for count in range(limit):
            for pieces in itertools.product([UNK, 4, 5], repeat=count):
                steps = [
                    most_probable(allowed(next_probabilities(network, source[0], pieces[:place])), sampling)[0]
                    for place in range(min(count + 1, limit - 1))
                ]
                answer = (*pieces, EOS)
                expected[answer] = math.prod(step[token] for step, token in zip(steps, answer, strict=False))
        for make in SEARCHES.values():
            sources = source.expand(number, -1).contiguous()
            found = make(network).sample(sources, None, torch.arange(number), sampling, 2)
            assert_distributed(answers(found), expected)


def test_top_k_and_top_p_by_hand() -> None:
    """Without embeddings, the network's logits are its output bias, the same at each step."""
    network, number = make_network(0, 1100, output_bias=True), 2000
    chances = torch.zeros(1100)
    for token, chance in {PAD: 0.5, UNK: 0.2, BOS: 0.1, EOS: 0.02, 40: 0.08, 1050: 0.1}.items():
        chances[token] = chance
    with torch.no_grad():
        network.embedding.weight.zero_()
        network.projection.bias.copy_(chances.log())  # type: ignore[operator, union-attr]
    for sampling, parts in (
        (Sampling(), {UNK: 20, EOS: 2, 40: 8, 1050: 10}),
        (Sampling(top_k=2), {UNK: 20, 1050: 10}),
        (Sampling(top_k=100), {UNK: 20, EOS: 2, 40: 8, 1050: 10}),
        (Sampling(top_k=1, temperature=100.0), {UNK: 1}),
        # Of all that can be drawn, UNK has 0.5, 1050 has 0.25, 40 has 0.2 and EOS 0.05.
        (Sampling(top_p=0.49), {UNK: 1}),
        (Sampling(top_p=0.51), {UNK: 20, 1050: 10}),
        (Sampling(top_p=0.76), {UNK: 20, 40: 8, 1050: 10}),
        # Of the two, UNK has 2 / 3.
        (Sampling(top_k=2, top_p=0.66), {UNK: 1}),
        (Sampling(top_k=2, top_p=0.67), {UNK: 20, 1050: 10}),
        (Sampling(temperature=0.5), {UNK: 20**2, EOS: 2**2, 40: 8**2, 1050: 10**2}),
        # Squared, UNK has 400 / 568 and 1050 has 100 / 568.
        (Sampling(temperature=0.5, top_p=0.71), {UNK: 4, 1050: 1}),
        (Sampling(temperature=1e-320), {UNK: 1}),
    ):
        for engine in SEARCHES:
            source = torch.full((number, 1), EOS)
            found = SEARCHES[engine](network).sample(source, None, torch.arange(number), sampling, 1)
            first = found.tokens[:, 0, 0].tolist()
            if len(parts) == 1:
                assert set(first) == set(parts)
            else:
                assert_distributed(first, {token: part / sum(parts.values()) for token, part in parts.items()})


@pytest.mark.parametrize(
    ("vocabulary_size", "engine"), [*((24, engine) for engine in ENGINES), *((1100, engine) for engine in SEARCHES)]
)
def test_equals_a_plain_sampler_without_cache_or_batch(vocabulary_size: int, engine: str) -> None:
    """Behind target prefixes, of which two are empty."""
    network, extra = trained_network() if vocabulary_size == 24 else fixed_network(11, 1100, sharpness=1.5), 4
    source, mask = make_sources(LENGTHS, vocabulary_size)
    lines, near = torch.arange(len(LENGTHS)) + 5, 2 * tolerance(network)
    sample = ENGINES[engine](network).sample
    drawn_near: list[tuple[int, bool]] = []
    for sampling in SETTINGS:
        found = sample(source, mask, lines, sampling, extra, 0.6, padded_prefixes())
        for sentence, length in enumerate(LENGTHS):
            limit = torch.tensor([length + extra])
            uniforms = draw_uniforms(sampling.seed, lines[sentence : sentence + 1], limit).tolist()
            [(score, tokens)] = answers_of(found, sentence)
            total = 0.0
            for place, token in enumerate(tokens):
                chances = next_probabilities(network, source[sentence, :length], tokens[:place])
                total += math.log(chances[token])
                forced = PREFIXES[sentence][place : place + 1] or [EOS] * (place == limit - 1)
                if forced:
                    assert [token] == forced
                    continue
                wanted, gap = most_probable(allowed(chances), sampling)
                drawn, margin = plain_draw(wanted, uniforms[place])
                drawn_near.append((drawn, min(margin, gap) <= near))
                assert drawn_near[-1] in ((token, False), (drawn, True))
            assert float(found.log_probabilities[sentence, 0]) == pytest.approx(total, abs=near)
            assert score == pytest.approx(penalized(total, len(tokens), 0.6), abs=near)
    decided = [token for token, is_near in drawn_near if not is_near]
    assert len(decided) > 0.8 * len(drawn_near)
    assert max(decided) >= vocabulary_size - 76


def test_a_line_has_the_same_sample_in_all_company() -> None:
    source, mask = make_sources(LENGTHS * 4)
    search, lines, sampling = SEARCHES["compiled"](trained_network()), torch.arange(len(LENGTHS) * 4), Sampling(1.2)
    found = search.sample(source, mask, lines, sampling, 8)
    search.max_tokens = 32
    order = lines.flip(0)
    other = search.sample(source[order], mask[order], order, sampling, 8)
    assert answers(found) == answers(other)[::-1]
    assert torch.equal(found.log_probabilities.flip(0), other.log_probabilities)
    # Lines of one text differ, and so do seeds.
    assert len(set(answers(found)[:: len(LENGTHS)])) > 1
    assert answers(search.sample(source, mask, lines, sampling._replace(seed=1), 8)) != answers(found)
    greedy = search.greedy(source, mask, 8)
    assert torch.equal(search.sample(source, mask, lines, Sampling(top_k=1), 8).tokens[:, 0], greedy.tokens)


def test_random_numbers_are_those_of_split_mix() -> None:
    # The first numbers of the generator's authors for this seed, and the formula in Python's integers.
    first = split_mix(torch.tensor(1234567), torch.arange(3)).tolist()
    assert [one % 2**64 for one in first] == [6457827717110365317, 3203168211198807973, 9817491932198370423]

    def mixed(state: int, index: int) -> int:
        x = (state + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    lines, counts = [0, 7, 2**40], [3, 1, 4]
    found = draw_uniforms(2**63 - 1, torch.tensor(lines), torch.tensor(counts)).tolist()
    expected = [
        [(mixed(mixed(2**63 - 1, line), 3 * place + step) >> 11) / 2**53 for step in range(3)]
        for line, count in zip(lines, counts, strict=True)
        for place in range(count)
    ]
    assert found == expected


def test_the_extreme_random_numbers_draw_tokens_that_can_be_drawn() -> None:
    logits = torch.full((2, 2000), -math.inf)
    logits[0, [5, 700, 1990]] = torch.tensor([0.1, 0.3, 0.6]).log()
    logits[1, 1500] = 0.0
    for uniform, expected in ((0.0, [5, 1500]), (1 - 2**-53, [1990, 1500])):
        assert choose(logits, torch.full((2, 3), uniform, dtype=torch.float64), Sampling()).tolist() == expected


def test_wrong_arguments_are_refused() -> None:
    source, line = torch.tensor([[4, 5, EOS]]), torch.tensor([1])
    bad: dict[str, tuple[Tensor, Sampling]] = {
        "temperature 0.* must": (line, Sampling(temperature=0.0)),
        "temperature nan must": (line, Sampling(temperature=math.nan)),
        "temperature inf must": (line, Sampling(temperature=math.inf)),
        "top_k 0 must be 1 or more": (line, Sampling(top_k=0)),
        "top_p 0.* must": (line, Sampling(top_p=0.0)),
        "top_p 1.5 must": (line, Sampling(top_p=1.5)),
        "seed -1 must": (line, Sampling(seed=-1)),
        r"of shape \[1\]": (torch.tensor([1, 2]), Sampling()),
        "lines must be int64": (line.float(), Sampling()),
    }
    for engine, make in ENGINES.items():
        search = make(make_network(0))
        for message, (lines, sampling) in bad.items():
            with pytest.raises(torch.jit.Error if engine == "scripted" else ValueError, match=message):
                search.sample(source, None, lines, sampling, 5)
