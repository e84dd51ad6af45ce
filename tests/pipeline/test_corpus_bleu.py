"""BLEU over batches and ranks is BLEU over all at once."""

import pytest
import sacrebleu

from pipeline.corpus_bleu import CorpusBleu

HYPOTHESES = ["the cat sat on the mat", "a dog runs through deep snow", "", "he says nothing at all today"]
REFERENCES = ["the cat sat on a mat", "a dog runs through the deep snow", "yes", "he said nothing at all"]


def test_batches_add_up() -> None:
    metric = CorpusBleu()
    metric.update([], [])
    assert metric.compute().item() == 0.0
    metric.reset()
    metric.update(HYPOTHESES[:1], REFERENCES[:1])
    metric.update([], [])
    metric.update(HYPOTHESES[1:], REFERENCES[1:])
    assert metric.compute().item() == pytest.approx(sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score, abs=1e-4)
