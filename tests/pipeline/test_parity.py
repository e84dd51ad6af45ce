"""How a format's answers compare with the checkpoint's: counts, bounds and figures, by numbers worked out by hand."""

import copy
import time
from dataclasses import replace
from typing import Any

import pytest
import sacrebleu
import torch

from data_module.errors import InputError
from data_module.tokenization.tokenizer import Tokenizer
from model.decoding import BeamSearch
from pipeline.export.formats import Answer, Runner, SearchRunner
from pipeline.export.parity import Parity, Text, Truth
from tests.model.search_truth import forced_log_probability
from tests.pipeline.test_export import TEXT, make_model, stops_at_first


@pytest.fixture(scope="module")
def searched(tokenizer: Tokenizer) -> Parity:
    return Parity(make_model(tokenizer), TEXT)


@pytest.fixture
def parity(searched: Parity) -> Parity:
    """A copy that a test may change."""
    return copy.copy(searched)


@pytest.fixture
def truth(searched: Parity, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], float]:
    """Log-probabilities that a test sets, by answer, in place of the network's; the tolerance is 1e-5."""
    set_ones: dict[tuple[int, ...], float] = {}
    monkeypatch.setattr(searched.truth, "log_probabilities", lambda pairs: [set_ones[tokens] for _, tokens in pairs])
    return set_ones


NAN = float("nan")


def test_scores_that_are_nan_are_refused(parity: Parity) -> None:
    assert parity.broken(parity.against(parity.beam)) == []
    assert parity.broken(parity.greedy_against(parity.greedy)) == []
    # Tokens are the same. The NaN is in the first answer, in the middle or in the last one.
    for place in (0, len(parity.beam) // 2, len(parity.beam) - 1):
        found = [list(answers) for answers in parity.beam]
        found[place][-1] = found[place][-1]._replace(score=NAN)
        figures = parity.against(found)
        assert figures["equal"] == len(TEXT.sources)
        [said] = parity.broken(figures)
        assert said.startswith("largest score difference nan")
        greedy = list(parity.greedy)
        greedy[place] = greedy[place]._replace(score=NAN)
        [said] = parity.broken(parity.greedy_against(greedy))
        assert said.startswith("greedy largest score difference nan")
    shorter = [parity.beam[0][:-1], *parity.beam[1:]]
    assert "largest score difference inf" in parity.broken(parity.against(shorter))[0]


@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("largest_score_difference", 1e-4),
        ("greedy_largest_score_difference", 1e-4),
        ("bleu_difference", 0.1),
        ("bleu_difference", -0.1),
    ],
)
def test_each_bound_is_kept(parity: Parity, name: str, bound: float) -> None:
    parity.sources, parity.tolerance = [parity.sources[0]] * 500, 1e-4
    assert parity.broken({name: bound}) == []
    assert parity.broken({name: 0.99 * bound}) == []
    for value in (1.01 * bound, NAN, float("inf")):
        assert len(parity.broken({name: value})) == 1
    # With fewer sentences, the bound on BLEU is not applied.
    del parity.sources[-1]
    assert len(parity.broken({name: 1.01 * bound})) == (0 if name == "bleu_difference" else 1)


@pytest.mark.parametrize("sharpness", [1.0, 3.0])
def test_the_tolerance_holds_for_float32_and_not_for_less(tokenizer: Tokenizer, sharpness: float) -> None:
    """It depends on the network: on one that amplifies rounding more, it is larger."""
    model = make_model(tokenizer)
    with torch.no_grad():
        for parameter in model.network.parameters():
            parameter.mul_(sharpness if parameter.dim() == 2 else 1.0)
    parity = Parity(model, TEXT)
    assert 0 < parity.greedy_against(parity.greedy)["greedy_largest_score_difference"] <= parity.tolerance / 2
    assert 0 < parity.against(parity.beam)["largest_score_difference"] <= parity.tolerance / 2
    # Weights that are rounded to half the digits.
    with torch.no_grad():
        for parameter in model.network.parameters():
            parameter.copy_(parameter.half())
    search = BeamSearch(model.network, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id).eval()
    figures = parity.compare(SearchRunner(search, model, "rounded"))
    assert any("score difference" in message for message in figures["broken"])


def test_the_tolerance_holds_for_a_network_that_is_certain(tokenizer: Tokenizer) -> None:
    """Noise in logits hardly changes a probability near 1, whose logarithm float32 rounds all the same."""
    model = make_model(tokenizer, output_bias=True)
    network: Any = model.network
    with torch.no_grad():
        network.embedding.weight *= 0.01
        network.projection.bias.fill_(0.0)[tokenizer.eos_id] = 9.0
    parity = Parity(model, TEXT)
    difference = parity.greedy_against(parity.greedy)["greedy_largest_score_difference"]
    assert 1e-9 < difference <= parity.tolerance / 2
    assert parity.tolerance < 1e-4


@pytest.mark.parametrize(("factor", "said"), [(1e4, "nearly diverged"), (float("nan"), "scores are not finite")])
def test_a_network_that_has_diverged_is_refused(tokenizer: Tokenizer, factor: float, said: str) -> None:
    """Its tolerance would allow any answer."""
    model = make_model(tokenizer)
    with torch.no_grad():
        model.network.decoder[-1].feed_forward_residual.norm.weight *= factor  # type: ignore[union-attr]
    with pytest.raises(InputError, match=rf"^letters\.ckpt: .*{said}.*; choose "):
        Parity(model, TEXT)


def test_the_checkpoint_stops_as_its_recipe_says(tokenizer: Tokenizer) -> None:
    model = stops_at_first(tokenizer)
    search = BeamSearch(model.network, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id).eval()
    exact = replace(model, decoding=replace(model.decoding, stop_rule="exact"))
    sources = [[*ids.tolist(), tokenizer.eos_id] for ids in tokenizer.encode(TEXT.sources)]
    answers = [SearchRunner(search, one, "search").beam(sources) for one in (model, exact)]
    assert answers[0] != answers[1]
    for source, first in zip(sources, answers[0], strict=True):
        found = search.beam(torch.tensor([source]), None, 2, 0.0, 4, 2, "first")
        assert first[0].tokens == tuple(found.tokens[0, 0, : found.lengths[0, 0]].tolist())


def test_the_tolerance_is_the_networks(searched: Parity) -> None:
    pairs = [(source, answer.tokens) for source, answer in zip(searched.sources, searched.greedy, strict=True)]
    assert searched.truth.tolerance(pairs) == searched.tolerance  # the noise is the same each time
    # No noise is left behind.
    fresh = Truth(searched.truth.network.network, searched.tokenizer)
    assert fresh.log_probabilities(pairs) == searched.truth.log_probabilities(pairs)
    assert next(fresh.network.parameters()).dtype == torch.float64
    assert searched.bounds["score_difference"] == searched.tolerance
    assert searched.bounds["tie"] == 2 * searched.tolerance


def test_sources_are_cut_and_empty_sources_left_out(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.export.parity.LONGEST", 5)
    text = Text("letters", ["a b c d e f", "", "ab", "a b c"], ["first", "no source", "third", "fourth"])
    parity = Parity(make_model(tokenizer), text)
    pieces = [ids.tolist() for ids in tokenizer.encode(text.sources)]
    assert [len(ids) for ids in pieces] == [11, 0, 1, 5]
    end = tokenizer.eos_id
    assert parity.sources == [[*pieces[0][:4], end], [*pieces[2], end], [*pieces[3][:4], end]]
    assert parity.references == ["first", "third", "fourth"]
    assert len(parity.beam) == len(parity.greedy) == 3


def test_a_sample_is_every_fourth_sentence(parity: Parity) -> None:
    parity.references = [f"reference {index}" for index in range(len(parity.sources))]
    some = parity.sample()
    for name in ("sources", "beam", "greedy", "references"):
        assert getattr(some, name) == [getattr(parity, name)[index] for index in (0, 4, 8)]
    assert len(parity.sources) == len(TEXT.sources) == 12
    parity.references = None
    assert parity.sample().references is None


END = 3


def test_beam_answers_are_counted_by_hand(parity: Parity, truth: dict[tuple[int, ...], float]) -> None:
    """The length penalty of four tokens is 1.5 ** alpha."""
    parity.tolerance, parity.settings = 1e-5, replace(parity.settings, length_penalty=2.0)
    best, second, near, far = ((5, 5, token, END) for token in (5, 6, 7, 8))
    truth.update({best: -2.25, second: -4.5, near: -2.25 - 4e-5, far: -2.25 + 5e-5})
    ours = [Answer(best, -1.0), Answer(second, -2.0)]
    parity.sources, parity.beam = parity.sources[:6], [ours] * 6
    tied, different = [Answer(near, -1.0), ours[1]], [Answer(far, -1.0), ours[1]]
    found = [ours, ours, tied, tied, tied, different]
    figures = parity.against(found)
    assert figures == {"equal": 2, "tied": 3, "different": 1, "largest_score_difference": 0.0}
    assert parity.broken(figures) == ["1 of 6 answers differ and are not ties"]
    # Scores are compared with the truth's, not with the checkpoint's, which may have hypotheses that tie in any order.
    parity.beam = [[ours[1]._replace(score=NAN), ours[0]]] * 6
    figures = parity.against([[Answer(second, -1.0), Answer(best, -2.25)]] * 6)
    assert figures["largest_score_difference"] == 0.25
    with pytest.raises(ValueError, match="shorter"):
        parity.against(found[:-1])


def test_greedy_answers_are_counted_by_hand(parity: Parity, truth: dict[tuple[int, ...], float]) -> None:
    """What comes after the first tokens that differ has no part in a tie."""
    parity.tolerance = 1e-5
    one = Answer((5, 6, END), -4.0)  # which ends with a probability of 1
    near, far, begin = (Answer(tokens, -4.0) for tokens in ((5, 7, 7, END), (5, 8, END), (5, 6)))
    truth.update({one.tokens: -4.0, near.tokens: -4.0, far.tokens: -4.25, begin.tokens: -4.0})
    truth.update({(5, 6): -4.0, (5, 7): -4.0 - 1.9e-5, (5, 8): -4.0 - 2.1e-5})
    parity.sources, parity.greedy = parity.sources[:1] * 5, [one] * 5
    figures = parity.greedy_against([one, near, near, far, begin])
    assert figures == {
        "greedy_equal": 1,
        "greedy_tied": 2,
        "greedy_different": 2,  # an answer without its end is not a tie
        "greedy_largest_score_difference": 0.25,
    }
    with pytest.raises(ValueError, match="shorter"):
        parity.greedy_against([one])


class Fixed(Runner):
    """A format with given answers."""

    def __init__(self, parity: Parity, beam: list[list[Answer]], greedy: list[Answer], **kinds: bool) -> None:
        vars(self).update(kinds)
        self.answers = {tuple(source): one for source, *one in zip(parity.sources, beam, greedy, strict=True)}

    def beam(self, sources: list[list[int]]) -> list[list[Answer]]:
        return [self.answers[tuple(source)][0] for source in sources] if self.has_beam else super().beam(sources)

    def greedy(self, sources: list[list[int]]) -> list[Answer]:
        return [self.answers[tuple(source)][1] for source in sources]


def test_what_is_compared_of_a_format(parity: Parity) -> None:
    """A wrong beam answer breaks a search of this project, a wrong greedy answer or score each format in float32."""
    for name in ("sources", "texts", "beam", "greedy"):  # each sentence once
        setattr(parity, name, getattr(parity, name)[:6])
    wrong = Answer((5, END), -1.0)
    beam, greedy = [[wrong], *parity.beam[1:]], [wrong, *parity.greedy[1:]]
    scores = [parity.greedy[0]._replace(score=1.0), *parity.greedy[1:]]

    def kinds(found_beam: list[list[Answer]], found_greedy: list[Answer]) -> list[bool]:
        options = ({"own_beam": True}, {"own_beam": False}, {"has_beam": False})
        return [bool(parity.compare(Fixed(parity, found_beam, found_greedy, **one))["broken"]) for one in options]

    assert kinds(parity.beam, parity.greedy) == [False, False, False]
    assert kinds(beam, parity.greedy) == [True, False, False]
    assert kinds(parity.beam, greedy) == [True, True, True]
    assert kinds(parity.beam, scores) == [True, True, True]
    parity.references = parity.texts
    figures = parity.compare(Fixed(parity, beam, greedy), bounded=False)
    assert "broken" not in figures
    assert figures["share_equal"] == round(5 / 6, 4)
    right = parity.compare(Fixed(parity, parity.beam, greedy))
    assert figures["bleu_difference"] == round(figures["bleu"] - right["bleu"], 4)
    assert right["bleu_difference"] == 0.0
    assert parity.compare(Fixed(parity, beam, greedy, has_beam=False))["search"] == "greedy"


def test_log_probabilities_are_those_of_the_search(parity: Parity) -> None:
    pairs = [(source, answer.tokens) for source, answer in zip(parity.sources, parity.greedy, strict=True)]
    expected = [
        forced_log_probability(parity.truth.network, torch.tensor(source), list(answer)) for source, answer in pairs
    ]
    assert parity.truth.log_probabilities(pairs) == pytest.approx(expected, abs=1e-12)
    assert Truth(parity.truth.network.network, parity.tokenizer).log_probabilities(pairs[:1] * 2) == pytest.approx(
        expected[:1] * 2, abs=1e-12
    )


@pytest.mark.parametrize(("num_sentences", "num_single"), [(4, 4), (12, 5)])
def test_throughput_and_latency(
    parity: Parity, monkeypatch: pytest.MonkeyPatch, num_sentences: int, num_single: int
) -> None:
    """The first two calls are slow; then each sentence takes 0.1357913 s."""
    now, calls = 50.0, []
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    best = parity.sources[0][:3]

    def beam(sources: list[list[int]]) -> list[list[Answer]]:
        nonlocal now
        now += 0.1357913 * len(sources) + {0: 100.0, 1: 10.0}.get(len(calls), 0.0)
        calls.append(len(sources))
        return [[Answer(tuple(best), 0.0), Answer(tuple(best[:1]), -1.0)] for _ in sources]

    parity.sources = [parity.sources[0]] * num_sentences
    [translation] = parity.tokenizer.decode([best])
    parity.references = [translation + " and what was left out"] * num_sentences
    answers, figures = parity.measure(beam)
    assert answers == beam(parity.sources)
    assert calls == [num_single, num_single, num_sentences, *[1] * num_single, num_sentences]
    expected = sacrebleu.corpus_bleu([translation] * num_sentences, [parity.references])
    assert figures.pop("bleu_signature").startswith("nrefs:1|case:mixed")
    assert figures == {
        "target_tokens_per_second": 22.1,
        "latency_median_seconds": 0.13579,
        "first_batch_seconds": round(100 + 0.1357913 * num_single, 4),
        "bleu": round(expected.score, 4),
    }


def test_the_length_penalty_of_other_programs_by_hand(parity: Parity) -> None:
    """For answers of 3 and 8 tokens, 5.5 on average: 0.6 * 5.5 / 10.5."""
    assert parity.settings.length_penalty == 0.6
    others = [Answer((5,) * 20, -1.0)]
    parity.beam = [[Answer((5,) * length, 0.0), *others] for length in (3, 8)]
    assert parity.power_penalty() == 0.314
