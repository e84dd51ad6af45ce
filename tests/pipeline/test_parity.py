"""How a format's answers compare with the checkpoint's: counts, bounds and figures, by numbers worked out by hand."""

import copy
import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
import sacrebleu
import torch

from data_module.errors import InputError
from data_module.tokenization.tokenizer import Tokenizer
from model.decoding import BeamSearch
from pipeline.export.formats import FORMATS, Answer, Search, own_search
from pipeline.export.parity import Parity, Text, _sum_rounding, parity_text
from tests.model.search_truth import forced_log_probability
from tests.pipeline.test_export import TEXT, make_model, stops_at_first

END = 3


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


def fixed(parity: Parity, beam: list[list[Answer]], greedy: list[list[Answer]]) -> Search:
    answers = {source: found for source, *found in zip(parity.sources, beam, greedy, strict=True)}
    return lambda sources, is_greedy: [answers[source][is_greedy] for source in sources]


NAN = float("nan")


def few(parity: Parity) -> None:
    """Keep sentences that are all different, which `fixed` needs."""
    for name in ("sources", "texts", "beam", "greedy"):
        setattr(parity, name, getattr(parity, name)[:6])


def test_each_bound_is_kept(parity: Parity) -> None:
    """A wrong beam answer breaks a search of this project, a wrong greedy answer or score each format in float32."""
    few(parity)
    wrong = [Answer((5, END), -1.0)]
    beam, greedy = [wrong, *parity.beam[1:]], [wrong, *parity.greedy[1:]]

    def messages(name: str, found_beam: list[list[Answer]], found_greedy: list[list[Answer]]) -> list[str]:
        return parity.exceeded(parity.compare(FORMATS[name], fixed(parity, found_beam, found_greedy)))

    def broken(found_beam: list[list[Answer]], found_greedy: list[list[Answer]]) -> list[bool]:
        return [bool(messages(name, found_beam, found_greedy)) for name in ("model.ts", "ctranslate2", "onnx")]

    assert broken(parity.beam, parity.greedy) == [False, False, False]
    assert broken(beam, parity.greedy) == [True, False, False]
    assert broken(parity.beam, greedy) == [True, True, True]
    # Tokens are the same. The score that is wrong is in the first answer, in the middle or in the last one.
    for place in (0, 3, 5):
        [right] = parity.greedy[place]
        true = parity.truth.log_probabilities([(parity.sources[place], right.tokens)])[0]
        for difference, is_broken in ((0.99, False), (-0.99, False), (1.01, True), (-1.01, True), (NAN, True)):
            scores = list(parity.greedy)
            scores[place] = [right._replace(score=true + difference * parity.tolerance)]
            assert broken(parity.beam, scores) == [is_broken] * 3
            n_best = [list(answers) for answers in parity.beam]
            n_best[place][-1] = n_best[place][-1]._replace(score=n_best[place][-1].score + 3 * difference)
            assert broken(n_best, parity.greedy) == [True, False, False]
    said = f"largest score difference inf is more than {parity.tolerance:.2g}"
    assert messages("model.ts", [parity.beam[0][:-1], *parity.beam[1:]], parity.greedy) == [said]
    # The search of model.pt2 is fixed: no greedy search, and as many answers as it was exported for.
    two = [answers[:2] for answers in parity.beam]
    assert parity.exceeded(parity.compare(FORMATS["model.pt2"], fixed(parity, two, greedy), n_best=2)) == []
    assert parity.exceeded(parity.compare(FORMATS["model.pt2"], fixed(parity, two, greedy), n_best=3)) == [said]


@pytest.mark.parametrize("sharpness", [1.0, 3.0])
def test_the_tolerance_holds_for_float32_and_not_for_less(tokenizer: Tokenizer, sharpness: float) -> None:
    """It depends on the network: on one that amplifies rounding more, it is larger."""
    model = make_model(tokenizer)
    with torch.no_grad():
        for parameter in model.network.parameters():
            parameter.mul_(sharpness if parameter.dim() == 2 else 1.0)
    parity = Parity(model, TEXT)
    for is_greedy in (True, False):
        answers = parity.greedy if is_greedy else parity.beam
        assert 0 < parity.judge(answers, is_greedy)["largest_score_difference"] <= parity.tolerance / 2
    # Weights that are rounded to half the digits.
    with torch.no_grad():
        for parameter in model.network.parameters():
            parameter.copy_(parameter.half())
    search = BeamSearch(model.network, *tokenizer.search_ids).eval()
    messages = parity.exceeded(parity.compare(FORMATS["model.ts"], own_search(search, model)))
    assert any("score difference" in message for message in messages)


def test_the_tolerance_holds_for_a_network_that_is_certain(tokenizer: Tokenizer) -> None:
    """Noise in logits hardly changes a probability near 1, whose logarithm float32 rounds all the same."""
    model = make_model(tokenizer, output_bias=True)
    network = model.network
    with torch.no_grad():
        network.embedding.weight *= 0.01
        network.projection.bias.fill_(0.0)[tokenizer.eos_id] = 9.0
    parity = Parity(model, TEXT)
    assert 1e-9 < parity.judge(parity.greedy, greedy=True)["largest_score_difference"] <= parity.tolerance / 2
    assert parity.tolerance < 1e-4


def test_the_sum_over_many_pieces_is_rounded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal terms are rounded in one direction; the tolerance grows with the vocabulary and the answers' lengths."""
    for num_pieces, least in ((20, 0.0), (70_000, 1e-5)):
        logits = torch.full((2, num_pieces), -2.3, dtype=torch.float64)
        logits[:, 0] = 0.0
        total = torch.tensor(0.0)
        for term in logits[0].exp().float():
            total += term
        expected = abs(math.log(total.double() / logits[0].exp().sum()))
        assert _sum_rounding(logits).tolist() == [[pytest.approx(expected, abs=1e-12)] * num_pieces] * 2
        assert least <= expected < max(least, 1e-6) * 1e3
    parity = Parity(make_model(tokenizer), TEXT)
    pairs = [(source, answer.tokens) for source, [answer] in zip(parity.sources, parity.greedy, strict=True)]
    monkeypatch.setattr("pipeline.export.parity._sum_rounding", lambda logits: torch.full_like(logits, 1e-3))
    longest = max(len(tokens) for _, tokens in pairs)
    assert 0.9e-3 * longest < parity.truth.tolerance(pairs) < 1.1e-3 * longest


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
    search = BeamSearch(model.network, *tokenizer.search_ids).eval()
    exact = replace(model, decoding=replace(model.decoding, stop_rule="exact"))
    sources = [(*ids.tolist(), tokenizer.eos_id) for ids in tokenizer.encode(TEXT.sources)]
    answers = [own_search(search, one)(sources, False) for one in (model, exact)]
    assert answers[0] != answers[1]
    for source, first in zip(sources, answers[0], strict=True):
        found = search.beam(torch.tensor([source]), None, 2, 0.0, 4, 2, "first")
        assert first[0].tokens == tuple(found.tokens[0, 0, : found.lengths[0, 0]].tolist())


def test_sources_are_cut_and_empty_sources_left_out(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.export.parity.LONGEST", 5)
    text = Text("letters", ["a b c d e f", "", "ab", "a b c"], ["first", "no source", "third", "fourth"])
    parity = Parity(make_model(tokenizer), text)
    pieces = [ids.tolist() for ids in tokenizer.encode(text.sources)]
    assert [len(ids) for ids in pieces] == [11, 0, 1, 5]
    end = tokenizer.eos_id
    assert parity.sources == [(*pieces[0][:4], end), (*pieces[2], end), (*pieces[3][:4], end)]
    assert parity.references == ["first", "third", "fourth"]
    assert len(parity.beam) == len(parity.greedy) == 3


def test_the_language_chooses_the_bleu_of_the_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model, file = make_model(tokenizer), tmp_path / "text"
    file.write_text("a b\n")
    for language, run, expected in (("zh", {}, "zh"), ("de", {}, "13a"), ("zh", {"bleu_tokenizer": "char"}, "char")):
        corpus = {**model.recipe["corpus"], "target_language": language}
        recipe = {"corpus": corpus, "run": {"bleu_tokenizer": None, "best_by": "bleu"} | run}
        assert parity_text(replace(model, recipe=recipe), file, file, 9).bleu_tokenizer == expected


def counted(equal: int, tied: int, different: int, largest: float) -> dict[str, float]:
    return {"equal": equal, "tied": tied, "different": different, "largest_score_difference": largest}


def test_beam_answers_are_counted_by_hand(parity: Parity, truth: dict[tuple[int, ...], float]) -> None:
    """The length penalty of four tokens is 1.5 ** alpha."""
    parity.tolerance, parity.settings = 1e-5, replace(parity.settings, length_penalty=2.0)
    best, second, near, far = ((5, 5, token, END) for token in (5, 6, 7, 8))
    truth.update({best: -2.25, second: -4.5, near: -2.25 - 4e-5, far: -2.25 + 5e-5})
    ours = [Answer(best, -1.0), Answer(second, -2.0)]
    parity.sources, parity.beam = parity.sources[:4], [ours] * 4
    found = [ours, [Answer(near, -1.0), ours[1]], [Answer(far, -1.0), ours[1]], ours]
    assert parity.judge(found, greedy=False) == counted(2, 1, 1, 0.0)
    # Scores are compared with the truth's, not with the checkpoint's, which may have hypotheses that tie in any order.
    parity.beam = [[ours[1]._replace(score=NAN), ours[0]]] * 4
    assert parity.judge([[Answer(second, -1.0), Answer(best, -2.0)]] * 4, greedy=False) == counted(4, 0, 0, 0.0)
    assert parity.judge([[Answer(second, -1.0), Answer(best, -2.25)]] * 4, greedy=False) == counted(4, 0, 0, 0.25)
    with pytest.raises(ValueError, match="shorter"):
        parity.judge(found[:-1], greedy=False)


def test_greedy_answers_are_counted_by_hand(parity: Parity, truth: dict[tuple[int, ...], float]) -> None:
    """What comes after the first tokens that differ has no part in a tie."""
    parity.tolerance = 1e-5
    one = Answer((5, 6, END), -4.0)
    near, far, begin = Answer((5, 7, 7, END), -9.0), Answer((5, 8, END), -4.25), Answer((5, 6), -4.0)
    truth.update({one.tokens: -4.0, near.tokens: -9.0, far.tokens: -4.0, begin.tokens: -3.0})
    truth.update({(5, 6): -3.0, (5, 7): -3.0 - 1.9e-5, (5, 8): -3.0 - 2.1e-5})
    parity.sources, parity.greedy = parity.sources[:4], [[one]] * 4
    assert parity.judge([[one], [near], [far], [one]], greedy=True) == counted(2, 1, 1, 0.25)
    assert parity.judge([[one], [near], [far], [begin]], greedy=True) == counted(1, 1, 2, 1.0)
    with pytest.raises(ValueError, match="shorter"):
        parity.judge([[one]], greedy=True)


def test_what_is_reported_of_a_format(parity: Parity) -> None:
    few(parity)
    parity.references = parity.texts
    checkpoint = fixed(parity, parity.beam, parity.greedy)
    parity.figures = parity.measure(checkpoint)[1]
    wrong = fixed(parity, [[Answer((5, END), -1.0)], *parity.beam[1:]], parity.greedy)
    figures = parity.compare(FORMATS["model.ts"], wrong, bounded=False)
    assert parity.exceeded(figures) == []
    assert (figures["sentences"], figures["share_equal"]) == (6, round(5 / 6, 4))
    right = parity.compare(FORMATS["model.ts"], checkpoint)
    assert figures["bleu_difference"] == round(figures["bleu"] - right["bleu"], 4)
    assert right["bleu_difference"] == 0.0
    parity.metric = "exact_match"
    parity.figures = parity.measure(checkpoint)[1]
    exact = parity.compare(FORMATS["model.ts"], checkpoint)
    assert exact["exact_match_signature"].startswith("nrefs:1|")
    assert (exact["exact_match_difference"], "bleu" in exact) == (0.0, False)
    parity.metric = "bleu"
    for kind in ("", "greedy_"):
        assert [right[kind + name] for name in ("equal", "tied", "different")] == [6, 0, 0]
        assert right[f"{kind}largest_score_difference"] <= parity.tolerance
    assert parity.compare(FORMATS["onnx"], wrong)["search"] == "greedy"


def test_log_probabilities_are_those_of_the_search(parity: Parity) -> None:
    """Also after the tolerance was measured, for which noise is added that is the same each time."""
    pairs = [(source, answer.tokens) for source, [answer] in zip(parity.sources, parity.greedy, strict=True)]
    expected = [
        forced_log_probability(parity.truth.network, torch.tensor(source), list(answer)) for source, answer in pairs
    ]
    assert parity.truth.log_probabilities(pairs * 2) == pytest.approx(expected * 2, abs=1e-12)
    assert parity.truth.tolerance(pairs) == parity.tolerance
    assert next(parity.truth.network.parameters()).dtype == torch.float64


def test_throughput_is_measured_after_two_calls(parity: Parity, monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = 50.0, []
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    best = parity.sources[5][:-1]  # six words, since BLEU of fewer than four is 0

    def beam(sources: list[tuple[int, ...]], is_greedy: bool) -> list[list[Answer]]:
        nonlocal now
        now += 0.1357913 * len(sources) if len(calls) > 1 else 100.0
        calls.append(len(sources))
        return [[Answer(best, 0.0), Answer(best[:1], -1.0)] for _ in sources]

    [translation] = parity.tokenizer.decode([best])
    parity.references = [translation + " and what was left out"] * len(parity.sources)
    answers, figures = parity.measure(beam)
    assert answers == beam(parity.sources, False)
    assert calls == [5, 5, 12, 12]
    expected = sacrebleu.corpus_bleu([translation] * 12, [parity.references])
    assert figures.pop("bleu_signature").startswith("nrefs:1|case:mixed")
    assert figures == {"target_tokens_per_second": round(len(best) / 0.1357913, 1), "bleu": round(expected.score, 4)}
    assert expected.score > 10


def test_the_length_penalty_of_other_programs_by_hand(parity: Parity) -> None:
    """For answers of 3 and 8 tokens, 5.5 on average: 0.6 * 5.5 / 10.5."""
    assert parity.settings.length_penalty == 0.6
    others = [Answer((5,) * 20, -1.0)]
    parity.beam = [[Answer((5,) * length, 0.0), *others] for length in (3, 8)]
    assert parity.power_penalty() == 0.314
