"""The private functions of sacreBLEU that this project calls give what its public ones give."""

import pytest
import sacrebleu

from pipeline.compat.sacrebleu import chrf_score, chrf_statistics

HYPOTHESES = ["the cat sat on the mat", "", "he says nothing at all today"]
REFERENCES = ["the cat sat on a mat", "yes", "he said nothing at all"]


def test_private_functions_of_chrf() -> None:
    for name in ("_extract_corpus_statistics", "_compute_f_score"):
        assert hasattr(sacrebleu.CHRF, name), f"sacreBLEU {sacrebleu.__version__} has no CHRF.{name}; see compat"
    metric = sacrebleu.CHRF()
    pairs = list(zip(HYPOTHESES, REFERENCES, strict=True))
    statistics = [chrf_statistics(metric, hypothesis, reference) for hypothesis, reference in pairs]
    assert {len(counts) for counts in statistics} == {3 * metric.order}
    for counts, (hypothesis, reference) in zip(statistics, pairs, strict=True):
        assert chrf_score(metric, counts) == pytest.approx(metric.sentence_score(hypothesis, [reference]).score)
    total = [sum(column) for column in zip(*statistics, strict=True)]
    assert chrf_score(metric, total) == pytest.approx(metric.corpus_score(HYPOTHESES, [REFERENCES]).score)
