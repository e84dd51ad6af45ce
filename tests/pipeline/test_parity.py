"""How a format's answers compare with the checkpoint's: counts, bounds and figures, by numbers worked out by hand."""

import copy
import time
from pathlib import Path

import pytest
import sacrebleu
import torch

from data_module.tokenization.tokenizer import Tokenizer, train_tokenizer
from pipeline.export.parity import Parity, Text, largest, size
from pipeline.export.runners import Answer
from tests.model.search_truth import VOCABULARY_SIZE, tolerance
from tests.pipeline.test_export import TEXT, make_model


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(train_tokenizer(["abcdefg gfedcba abc cab ab"], VOCABULARY_SIZE))


@pytest.fixture(scope="module")
def searched(tokenizer: Tokenizer) -> Parity:
    model = make_model(tokenizer)
    return Parity(model.network, tokenizer, model.decoding, TEXT, 100)


@pytest.fixture
def parity(searched: Parity) -> Parity:
    """A copy that a test may change."""
    return copy.copy(searched)


def test_ties_and_differences(parity: Parity) -> None:
    first = parity.beam[0][0]
    other = (*first.tokens[:-1], 5, first.tokens[-1])
    for offset, kind in ((0.9e-5, "tied"), (2e-5, "different")):
        found = [[first._replace(tokens=other, score=first.score + offset), *parity.beam[0][1:]], *parity.beam[1:]]
        figures = parity.against(found)
        assert (figures["equal"], figures[kind]) == (11, 1)
        assert bool(parity.broken(figures)) == (kind == "different")
    # A greedy answer that differs where one token is clearly more probable is not a tie.
    greedy = [parity.greedy[0]._replace(tokens=other), *parity.greedy[1:]]
    assert parity.greedy_against(greedy)["greedy_different"] == 1
    assert any("greedy answers differ" in message for message in parity.broken(parity.greedy_against(greedy)))


NAN = float("nan")


def test_scores_and_logits_that_are_nan_are_refused(parity: Parity) -> None:
    assert parity.broken(parity.against(parity.beam)) == []
    # Tokens are the same. The NaN is in the first answer, in the middle or in the last one.
    for place in (0, len(parity.beam) // 2, len(parity.beam) - 1):
        found = [list(answers) for answers in parity.beam]
        found[place][-1] = found[place][-1]._replace(score=NAN)
        figures = parity.against(found)
        assert figures["equal"] == len(TEXT.sources)
        [said] = parity.broken(figures)
        assert said.startswith("largest score difference nan")
    shorter = [parity.beam[0][:-1], *parity.beam[1:]]
    assert "largest score difference inf" in parity.broken(parity.against(shorter))[0]

    def logits(source: torch.Tensor, mask: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return parity.network.logits(parity.network(source, target, mask))

    assert parity.logits_difference(logits) == 0.0
    for row in (0, -1):

        def wrong(*inputs: torch.Tensor, row: int = row) -> torch.Tensor:
            return logits(*inputs).index_put((torch.tensor(row), torch.tensor(0), torch.tensor(3)), torch.tensor(NAN))

        [said] = parity.broken({"largest_logit_difference": parity.logits_difference(wrong)})
        assert said.startswith("largest logit difference nan")


@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("largest_score_difference", 1e-4),
        ("largest_forced_score_difference", 1e-4),
        ("largest_logit_difference", 1e-4),
        ("bleu_difference", 0.1),
        ("bleu_difference", -0.1),
    ],
)
def test_each_bound_is_kept(parity: Parity, name: str, bound: float) -> None:
    parity.sources = [parity.sources[0]] * 500
    assert parity.broken({name: bound}) == []
    assert parity.broken({name: 0.99 * bound}) == []
    for value in (1.01 * bound, NAN, float("inf")):
        assert len(parity.broken({name: value})) == 1
    # With fewer sentences, the bound on BLEU is not applied.
    del parity.sources[-1]
    assert len(parity.broken({name: 1.01 * bound})) == (0 if name == "bleu_difference" else 1)


def test_sources_are_cut_and_empty_sources_left_out(tokenizer: Tokenizer) -> None:
    model = make_model(tokenizer)
    text = Text("letters", ["a b c d e f", "", "ab", "a b c"], ["first", "no source", "third", "fourth"])
    parity = Parity(model.network, tokenizer, model.decoding, text, 5)
    pieces = [ids.tolist() for ids in tokenizer.encode(text.sources)]
    assert [len(ids) for ids in pieces] == [11, 0, 1, 5]
    end = tokenizer.eos_id
    assert parity.sources == [[*pieces[0][:4], end], [*pieces[2], end], [*pieces[3][:4], end]]
    assert parity.references == ["first", "third", "fourth"]
    assert len(parity.beam) == len(parity.greedy) == 3


def test_another_form_of_the_network_is_searched_again(parity: Parity, tokenizer: Tokenizer) -> None:
    other = parity.with_network(make_model(tokenizer, d_ff=40).network, "other")
    assert other.sources == parity.sources
    assert other.beam != parity.beam
    assert other.greedy != parity.greedy
    assert parity.with_network(parity.network, "same").beam == parity.beam


def test_a_sample_is_every_fourth_sentence(parity: Parity) -> None:
    parity.references = [f"reference {index}" for index in range(len(parity.sources))]
    some = parity.sample()
    for name in ("sources", "beam", "greedy", "references"):
        assert getattr(some, name) == [getattr(parity, name)[index] for index in (0, 4, 8)]
    texts = parity.tokenizer.decode([answers[0].tokens for answers in some.beam])
    assert some.bleu == round(sacrebleu.corpus_bleu(texts, [some.references]).score, 4)
    assert len(parity.sources) == len(TEXT.sources) == 12
    assert some.share_equal(some.beam) == 1.0
    parity.references = None
    assert parity.sample().bleu is None


END = 3


def test_beam_answers_are_counted_by_hand(parity: Parity) -> None:
    one, two = Answer((5, END), 0.0), Answer((6, END), -1.0)
    parity.beam = [[one, two]] * 6
    tied, different = [Answer((6, END), 1e-5), one], [Answer((6, END), 1.1e-5), one]
    found = [[one, two], [one, two], tied, tied, tied, different]
    figures = parity.against(found)
    assert {name: figures[name] for name in ("equal", "tied", "different")} == {"equal": 2, "tied": 3, "different": 1}
    assert figures["largest_score_difference"] == 1.0
    assert parity.share_equal(found) == 0.3333
    for compare in (parity.against, parity.share_equal):
        with pytest.raises(ValueError, match="shorter"):
            compare(found[:-1])


def test_greedy_answers_are_counted_by_hand(parity: Parity) -> None:
    """Tokens with equal embeddings always have equal probabilities."""
    parity.network = copy.deepcopy(parity.network)
    one = parity.greedy[0]
    used = {*one.tokens}
    twin, other = [token for token in range(4, VOCABULARY_SIZE) if token not in used][:2]
    weight = parity.network.embedding.weight
    with torch.no_grad():
        weight[twin] = weight[one.tokens[1]]
    parity.sources, parity.greedy = parity.sources[:1] * 8, [one] * 8
    tied = one._replace(tokens=(one.tokens[0], twin, END))
    different = [
        one._replace(tokens=(one.tokens[0], other, END)),
        one._replace(tokens=(other, *one.tokens[1:])),
        one._replace(tokens=one.tokens[:-1]),
    ]
    counts = parity.greedy_against([one, one, tied, tied, tied, *different])
    assert counts == {"greedy_equal": 2, "greedy_tied": 3, "greedy_different": 3}
    with pytest.raises(ValueError, match="shorter"):
        parity.greedy_against([one])


def test_log_probabilities_are_those_of_the_search(parity: Parity) -> None:
    scores = [answer.score for answer in parity.greedy]
    assert parity.log_probabilities() == pytest.approx(scores, abs=tolerance(parity.network))


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


def test_the_largest_of_differences() -> None:
    assert largest([]) == 0.0
    assert largest([0.1, 0.05]) == 0.1  # not rounded to float32


def test_the_size_of_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name, contents in (("a", b"123"), ("b", b"4567")):
        (tmp_path / "folder" / name).write_bytes(contents)
    assert size(tmp_path / "folder" / "a") == 3
    assert size(tmp_path / "folder") == 7
