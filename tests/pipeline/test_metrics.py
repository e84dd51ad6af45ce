"""Scores, intervals and p-values, by hand and against sacreBLEU; the metric registry; warnings about references."""

import math
import random
import re
import sys
from collections.abc import Sequence

import pytest
import sacrebleu
from sacrebleu.significance import PairedTest

from data_module.errors import InputError
from data_module.system.files import PlainValues
from pipeline.inference import metrics as promised
from pipeline.metrics import metrics
from pipeline.metrics.metrics import (
    METRICS,
    corpus_score,
    mode_of,
    n_best_scores,
    of_one_reference,
    paper_score,
    reference_warnings,
    score_and_compare,
)

REFERENCES = [
    "Der Vater-Sohn-Tag ist heute.",
    "Zwei Hunde laufen durch den Schnee.",
    "Ein Mann, der liest, sitzt auf einer Bank.",
    "Die Frau sagt nichts.",
]


def test_the_module_of_version_1_has_the_same_registry() -> None:
    assert promised.METRICS is METRICS
    assert promised.score is metrics.score


def test_paper_bleu_by_hand() -> None:
    # Tokens: Der Vater ##AT##-##AT## Sohn ##AT##-##AT## Tag ist heute . (9), and one of them wrong.
    reference, hypothesis = "Der Vater-Sohn-Tag ist heute.", "Der Vater-Sohn-Tag war heute."
    # n-grams of 9 tokens: 8 of 9, 6 of 8, 4 of 7, 3 of 6 are right.
    expected = 100 * math.exp(sum(map(math.log, (8 / 9, 6 / 8, 4 / 7, 3 / 6))) / 4)
    figures = paper_score([hypothesis], [reference], "de")
    assert figures["bleu_paper"] == pytest.approx(expected, abs=1e-3)
    # Without splitting compounds, no 4-gram matches.
    assert figures["bleu_paper"] > sacrebleu.corpus_bleu([hypothesis], [[reference]]).score
    assert "case:mixed" in figures["bleu_paper_signature"]
    assert "smooth:none" in figures["bleu_paper_signature"]
    assert "compounds:split" in figures["bleu_paper_signature"]


def test_only_the_papers_bleu_is_not_smoothed() -> None:
    """No 3-gram matches."""
    texts = ["Zwei Hunde liegen heute still."], ["Zwei Hunde laufen heute schnell."]
    assert score_and_compare(*texts)[0]["bleu"] == pytest.approx(
        sacrebleu.corpus_bleu(texts[0], [texts[1]]).score, abs=1e-4
    )
    figures = paper_score(*texts, "de")
    assert score_and_compare(*texts)[0]["bleu"] > figures["bleu_paper"] == figures["bleu_moses_lowercase"] == 0


def test_paper_bleu_is_case_sensitive_and_normalizes_quotation_marks() -> None:
    assert paper_score(["„Ja“, sagt er heute."], ["“Ja„, sagt er heute."], "de")["bleu_paper"] < 100
    assert paper_score(["Er sagt ”Ja“ heute."], ['Er sagt "Ja" heute.'], "de")["bleu_paper"] == pytest.approx(100)
    assert paper_score([REFERENCES[1].lower()], [REFERENCES[1]], "de")["bleu_paper"] < 90


def test_lowercase_moses_bleu_by_hand() -> None:
    # Tokens: zwei vater-sohn-paare laufen heute durch den tiefen schnee . (9), and the seventh wrong.
    reference = "Zwei Vater-Sohn-Paare laufen heute durch den tiefen Schnee."
    hypothesis = "zwei Vater-Sohn-Paare laufen heute durch den Weißen schnee."
    expected = 100 * math.exp(sum(map(math.log, (8 / 9, 6 / 8, 4 / 7, 3 / 6))) / 4)
    figures = paper_score([hypothesis], [reference], "de")
    assert figures["bleu_moses_lowercase"] == pytest.approx(expected, abs=1e-3)
    assert "case:lc" in figures["bleu_moses_lowercase_signature"]
    assert "compounds:whole" in figures["bleu_moses_lowercase_signature"]


def test_without_sacremoses_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    with pytest.raises(InputError, match=r"\.\[paper-score\]"):
        paper_score(REFERENCES, REFERENCES, "de")


def compare(hypotheses: list[str], others: list[str], references: list[str]) -> PlainValues:
    return score_and_compare(hypotheses, references, other=others)[1]


def test_a_difference_that_chance_gives_in_1_of_20_test_sets_is_not_real(monkeypatch: pytest.MonkeyPatch) -> None:
    for p_value, is_real in ((0.05, False), (0.0499, True)):
        monkeypatch.setattr(metrics, "_p_value", lambda *_, p_value=p_value: p_value)
        figures = compare(["a b c d e"], ["a b c d f"], ["a b c d e"])
        assert figures["bleu_p_value"] == p_value
        assert figures["bleu_difference_is_real"] is figures["chrf_difference_is_real"] is is_real


def test_sacrebleu_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    """It would warn of tokenized text, which `paper_score` makes."""
    lines = ["ein Hund läuft sehr schnell.", "zwei Hunde laufen schnell."] * 60
    paper_score(lines, lines, "de")
    assert not caplog.records


@pytest.mark.parametrize(
    ("references", "words"),
    [
        (REFERENCES, []),
        (["Zwei Hunde laufen , und dann nicht mehr .", "Ein Mann liest ."], ["tokenized"]),
        (["Er sagt &quot; Ja &quot;", "Vater @-@ Sohn"], ["tokenized"]),
        ([line.lower() for line in REFERENCES], ["lower-cased"]),
        (["zwei hunde laufen .", "ein mann liest ."], ["tokenized", "lower-cased"]),
        (["zwei hunde laufen."] * 49 + ["Ein Mann liest."], []),
        (["zwei hunde laufen."] * 50 + ["Ein Mann liest."], ["lower-cased"]),
        (["Ein Mann liest .", "Ein Hund .", *["Ein Mann liest."] * 2], []),
        (["Ein Mann liest .", "Ein Hund .", "Ein Mann liest."], ["tokenized"]),
        (["Ça va ?", "Oui : 3,5 % !"], []),
        (["K U T Y A .", "<PL> H Á Z ."], []),
        (["犬が走る。", "猫 3.5"], []),
        ([""], []),
    ],
)
def test_reference_warnings(references: list[str], words: list[str]) -> None:
    messages = reference_warnings(references, REFERENCES)
    assert len(messages) == len(words)
    assert all(word in message for word, message in zip(words, messages, strict=True))


def test_capitals_that_one_side_lacks_are_named() -> None:
    lower = [line.lower() for line in REFERENCES]
    [message] = reference_warnings(REFERENCES, lower)
    assert message.startswith("have capitals, and the translations none: read bleu_lowercase")
    assert reference_warnings(lower, lower) == []
    assert reference_warnings(lower, ["EIN HUND" for _ in lower]) != []
    assert reference_warnings(lower, ["" for _ in lower]) != []


def test_references_in_another_normal_form_are_named() -> None:
    composed, decomposed, plain = ["Un caf\xe9."], ["Un cafe\u0301."], ["Un the."]
    for references, hypotheses, form in ((decomposed, composed, "nfc"), (composed, decomposed, "nfd")):
        [message] = reference_warnings(references, hypotheses)
        assert message.startswith("have accents in another normal form than the translations: ")
        assert message.endswith(f"(uconv -x any-{form})")
    for alike in (composed, decomposed, plain):
        for references, hypotheses in ((alike, alike), (plain, alike), (alike, plain)):
            assert reference_warnings(references, hypotheses) == []


def test_exact_match_ignores_white_space() -> None:
    hypotheses = ["a b", " a  b ", "a B", "a", ""]
    assert score_and_compare(hypotheses, ["a b"] * 5)[0]["exact_match"] == pytest.approx(40)


def test_intervals_where_some_draws_match_nothing() -> None:
    """As for a poor translation of few lines."""
    figures, _ = score_and_compare(
        ["zwei Hunde laufen schnell", "x y z", "x y"], ["zwei Hunde laufen schnell", "a b c", "a b"]
    )
    low, high = figures["bleu_interval"]
    assert low < 1
    assert high > figures["bleu"] > 1


def test_intervals_do_not_leave_the_scale() -> None:
    low, high = score_and_compare(["a b"] * 99 + ["b a"], ["a b"] * 100)[0]["exact_match_interval"]
    assert 95 < low < 99 < high <= 100


def test_scores_intervals_and_signatures_are_sacrebleus() -> None:
    """Of one reference and of two, which metrics of one reference leave out."""
    draws = random.Random(5)
    words = ["ein", "Hund", "und", "Katze,", "läuft.", "schnell"]
    first, second, hypotheses = (
        [" ".join(draws.choices(words, k=draws.randint(1, 9))) for _ in range(40)] for _ in "abc"
    )
    hypotheses[:9], second[9:15], hypotheses[15] = first[:9], hypotheses[9:15], ""
    for references in ([first], [first, second]):
        figures, _ = score_and_compare(hypotheses, references[0], more=references[1:], requested=["ter", "chrf2++"])
        for name, theirs in (
            ("bleu", sacrebleu.BLEU()),
            ("bleu_lowercase", sacrebleu.BLEU(lowercase=True)),
            ("chrf", sacrebleu.CHRF()),
            ("ter", sacrebleu.TER()),
            ("chrf2++", sacrebleu.CHRF(word_order=2)),
        ):
            expected = theirs.corpus_score(hypotheses, references, n_bootstrap=1000)
            assert figures[name] == pytest.approx(expected.score, abs=1e-4)
            low, high = figures[f"{name}_interval"]
            assert [low, high] == pytest.approx(
                [expected._mean - expected._ci, expected._mean + expected._ci], abs=2e-3
            )
            assert figures[f"{name}_signature"] == theirs.get_signature().format()
        matches = [line in lines for line, *lines in zip(hypotheses, *references, strict=True)]
        assert figures["exact_match"] == 100 * sum(matches) / 40
    assert of_one_reference(["ter"]) == []


def test_p_values_are_sacrebleus() -> None:
    draws = random.Random(5)
    references = [" ".join(draws.choices(["ein", "Hund", "und", "Katze,", "läuft.", ""], k=9)) for _ in range(50)]
    this, other = (
        [" ".join("falsch" if draws.random() < share else w for w in line.split()) for line in references]
        for share in (0.2, 0.24)
    )
    comparison = compare(this, other, references)
    theirs = {"bleu": sacrebleu.BLEU(), "chrf": sacrebleu.CHRF()}
    _, columns = PairedTest([("other", other), ("this", this)], theirs, [references], test_type="bs")()
    for name, title in (("bleu", "BLEU"), ("chrf", "chrF2")):
        assert comparison[name] == round(columns[title][0].score, 4)
        assert comparison[f"{name}_p_value"] == round(columns[title][1].p_value, 4)
    assert 0.01 < comparison["bleu_p_value"] < 1
    opposite = compare(other, this, references)
    assert opposite["bleu_difference"] == -comparison["bleu_difference"] < 0
    itself = compare(this, this, references)
    for name in ("bleu", "chrf"):
        found = [itself[f"{name}_{kind}"] for kind in ("difference", "p_value", "difference_is_real")]
        assert found == [0, 1, False]


class Lines:
    """Share of lines with as many words as their reference."""

    def signature(self) -> str:
        return "words:split"

    def statistics(self, hypothesis: str, reference: str) -> list[int]:
        return [len(hypothesis.split()) == len(reference.split()), 1]

    def score(self, statistics: Sequence[float]) -> float:
        return 100.0 * statistics[0] / max(statistics[1], 1)


class Errors:
    """Share of wrong lines, from 0 to 1; none is right if the reference is a question mark."""

    higher_is_better = False

    def signature(self) -> str:
        return "nrefs:1"

    def statistics(self, hypothesis: str, reference: str) -> list[int]:
        return [hypothesis != reference, reference != "?"]

    def score(self, statistics: Sequence[float]) -> float:
        return statistics[0] / statistics[1] if statistics[1] else float("nan")


def test_a_right_answer_is_as_good_as_the_best_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METRICS, "errors", Errors())
    for references, right in ((["a", "?"], [0, 50]), (["?", "?"], [0, 0])):
        figures, versus = n_best_scores([["x", "a"], ["x"]], [references], 3)
        assert [figures[f"errors@{count}"] for count in (1, 3)] == right
        assert versus == {}


def test_a_registered_metric_is_scored_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METRICS, "line_length", Lines())
    references, good, bad = ["a b", "c d"] * 20, ["a x", "c y"] * 20, ["a x", "c"] * 20
    figures, _ = score_and_compare(bad, references)
    assert figures["line_length"] == 50
    low, high = figures["line_length_interval"]
    assert low < 50 < high
    assert figures["line_length_signature"] == "bs:1000|seed:12345|words:split"
    comparison = compare(good, bad, references)
    assert comparison["line_length"] == comparison["line_length_difference"] == 50
    assert comparison["line_length_difference_is_real"] is True
    assert corpus_score(METRICS["line_length"], bad, references) == 50
    monkeypatch.setattr(Lines, "statistics", lambda *_: [0.5, 1])
    with pytest.raises(TypeError, match="float64"):  # Halves would count as nothing.
        corpus_score(METRICS["line_length"], bad, references)


def test_names_that_cannot_be_registered() -> None:
    for name in ("chrf", "exact_match", "accuracy", "likelihood", "best_bleu", "scores", "a b"):
        with pytest.raises(ValueError, match="ident" if name == "a b" else "is taken"):
            METRICS[name] = Lines()
    assert list(METRICS) == ["bleu", "chrf", "exact_match"]


def test_what_cannot_choose_checkpoints() -> None:
    """A metric or the likelihood whose name is near is proposed."""
    for name, way_out in (
        ("likelyhood", "did you mean likelihood?"),
        ("xyz", "registered are: bleu, chrf, exact_match, l"),
    ):
        with pytest.raises(InputError, match=f"^run.best_by '{name}' is not registered; {re.escape(way_out)}"):
            mode_of(name)
