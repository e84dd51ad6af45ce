"""Scores summed over batches and ranks equal sacreBLEU's scores of the whole text."""

import pytest
import sacrebleu
import torch

from pipeline.inference.metrics import METRICS
from pipeline.monitoring.validation_metrics import ValidationMetrics
from tests.pipeline.test_metrics import Lines

HYPOTHESES = ["the cat sat on the mat", "a dog runs through deep snow", "", "he says nothing at all today"]
REFERENCES = ["the cat sat on a mat", "a dog runs through the deep snow", "yes", "he said nothing at all"]
PIECES = [[4, 5, 6, 7, 8], [4, 5, 6, 7, 4, 5, 6, 7, 4, 5], [], [9, 9, 9, 9, 9]]
LENGTHS = [10, 11, 75, 61]


def test_batches_add_up() -> None:
    metric = ValidationMetrics()
    metric.update([], [], [], [])
    assert metric.compute()["validation/bleu"] == 0.0
    metric.reset()
    metric.update(HYPOTHESES[:1], REFERENCES[:1], PIECES[:1], LENGTHS[:1])
    metric.update([], [], [], [])
    metric.update(HYPOTHESES[1:], REFERENCES[1:], PIECES[1:], LENGTHS[1:])
    expected = [
        sacrebleu.sentence_chrf(*pair).score for pair in zip(HYPOTHESES, [[r] for r in REFERENCES], strict=True)
    ]
    assert metric.sentence_scores == pytest.approx(expected[1:])
    scores = metric.compute()
    assert scores["validation/bleu"] == pytest.approx(sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score)
    assert scores["validation/chrf"] == pytest.approx(sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score)
    # 6 + 6 + 0 + 6 words; the references have 6 + 7 + 1 + 5.
    assert scores["validation/length_ratio"] == pytest.approx(18 / 19)
    # Of 2 + 7 + 0 + 2 runs of four pieces, 3 in the second and 1 in the fourth translation are repeated.
    assert scores["validation/repetition"] == pytest.approx(4 / 11)
    by_length = {name: value for name, value in scores.items() if "length/" in name}
    assert list(by_length) == [f"validation_bleu_by_length/{name}_pieces" for name in ("01-10", "11-20", "61-")]
    for name, chosen in (("01-10", slice(0, 1)), ("11-20", slice(1, 2)), ("61-", slice(2, 4))):
        alone = sacrebleu.corpus_bleu(HYPOTHESES[chosen], [REFERENCES[chosen]]).score
        assert by_length[f"validation_bleu_by_length/{name}_pieces"] == pytest.approx(alone)
    assert "tok:13a" in metric.signatures()
    assert "chrF nrefs:1" in metric.signatures()
    assert ValidationMetrics().signatures() == metric.signatures()  # also on a rank without text


def test_ranks_add_up() -> None:
    """Merged scores equal those of one process with all translations."""
    whole, first, second = ValidationMetrics(), ValidationMetrics(), ValidationMetrics()
    whole.update(HYPOTHESES, REFERENCES, PIECES, LENGTHS)
    first.update(HYPOTHESES[:1], REFERENCES[:1], PIECES[:1], LENGTHS[:1])
    second.update(HYPOTHESES[1:], REFERENCES[1:], PIECES[1:], LENGTHS[1:])
    first.merge_state(second)
    assert first.compute() == whole.compute()


def test_each_text_source_has_its_scores() -> None:
    """Batches of the first, the second and again the first source; a third source has no pair."""
    metric, other = (ValidationMetrics(sources=["de", "fr", "it"]) for _ in range(2))
    metric.update(HYPOTHESES[:1], REFERENCES[:1], PIECES[:1], LENGTHS[:1], 0)
    metric.update(HYPOTHESES[1:2], REFERENCES[1:2], PIECES[1:2], LENGTHS[1:2], 1)
    other.update(HYPOTHESES[2:], REFERENCES[2:], PIECES[2:], LENGTHS[2:], 0)
    metric.merge_state(other)
    scores = metric.compute()
    whole = ValidationMetrics()
    whole.update(HYPOTHESES, REFERENCES, PIECES, LENGTHS)
    apart = {name: scores.pop(name) for name in list(scores) if name.count("/") == 2}
    assert scores == whole.compute()
    assert not any(name.count("/") == 2 for name in whole.compute())
    for name, chosen in (("de", [0, 2, 3]), ("fr", [1])):
        hypotheses, references = ([lines[i] for i in chosen] for lines in (HYPOTHESES, REFERENCES))
        assert apart.pop(f"validation/bleu/{name}") == pytest.approx(
            sacrebleu.corpus_bleu(hypotheses, [references]).score
        )
        assert apart.pop(f"validation/chrf/{name}") == pytest.approx(
            sacrebleu.corpus_chrf(hypotheses, [references]).score
        )
    assert apart == {f"validation/exact_match/{name}": 0.0 for name in ("de", "fr")}


def test_empty_translations_count_in_their_bucket_and_source() -> None:
    metric = ValidationMetrics(sources=["de", "fr"])
    metric.update([""], ["yes"], [[]], [25], 1)
    scores = metric.compute()
    assert scores["validation_bleu_by_length/21-30_pieces"] == scores["validation/bleu/fr"] == 0.0
    assert "validation/bleu/de" not in scores


def test_each_length_has_its_bucket() -> None:
    for length, name in (
        *((length, "01-10") for length in (1, 10)),
        *((length, "11-20") for length in (11, 20)),
        *((length, "21-30") for length in (21, 30)),
        *((length, "31-40") for length in (31, 40)),
        *((length, "41-60") for length in (41, 60)),
        *((length, "61-") for length in (61, 500)),
    ):
        metric = ValidationMetrics()
        metric.update(["yes"], ["yes"], [[4]], [length])
        scores = metric.compute()
        assert [key for key in scores if "length/" in key] == [f"validation_bleu_by_length/{name}_pieces"]
        assert scores["validation/length_ratio"] == 1.0


def test_sums_are_exact_and_lists_are_of_one_length() -> None:
    metric = ValidationMetrics()
    # float32 is exact only up to 2 ** 24.
    assert len(metric.metric_state) == 4
    assert {state.dtype for state in metric.metric_state.values()} == {torch.int64}
    with pytest.raises(ValueError, match="shorter"):
        metric.update(["yes", "no"], ["yes", "no"], [[4], [5]], [1])


def test_a_registered_metric_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    # A name that ValidationMetrics has as a method.
    monkeypatch.setitem(METRICS, "compute", Lines())
    metric, other = ValidationMetrics(), ValidationMetrics()
    metric.update(HYPOTHESES[:1], REFERENCES[:1], PIECES[:1], LENGTHS[:1])
    other.update(HYPOTHESES[1:], REFERENCES[1:], PIECES[1:], LENGTHS[1:])
    metric.merge_state(other)
    scores = metric.compute()
    assert list(scores)[2:4] == ["validation/exact_match", "validation/compute"]
    assert scores["validation/compute"] == 25.0
    assert metric.signatures().endswith("; compute words:split")
