"""Validation decodes each pair on one of the ranks, and its BLEU is that of one process with all of them."""

import json
from pathlib import Path

import pytest
import sacrebleu

from tests.integration.runs import start


@pytest.mark.slow
def test_bleu_over_two_ranks_is_bleu_on_one(trained_run: Path, tiny_corpus: Path, tmp_path: Path) -> None:
    checkpoint = trained_run / "checkpoints" / "best.ckpt"
    for ranks in (1, 2):
        process = start(checkpoint, tiny_corpus, ranks, tmp_path, module="tests.integration.validating")
        assert process.wait() == 0
    alone, first, second = (json.loads((tmp_path / name).read_text()) for name in ("1-0", "2-0", "2-1"))
    references = (tiny_corpus.parent / "validation.target").read_text().split("\n")[:-1]
    every = list(range(len(references)))
    assert sorted(alone["pairs"]) == sorted(first["pairs"] + second["pairs"]) == every
    assert 0.3 * len(every) < len(first["pairs"]) < 0.7 * len(every)

    translations = {**first["translations"], **second["translations"]}
    assert translations == alone["translations"]
    expected = sacrebleu.corpus_bleu([translations[str(pair)] for pair in every], [references]).score
    assert 1 < expected < 100
    for note in (alone, first, second):
        assert note["bleu"] == pytest.approx(expected, abs=1e-4)
        assert note["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    # A rank's own score is another one: there was something to sum.
    own = first["pairs"]
    mine = sacrebleu.corpus_bleu([translations[str(p)] for p in own], [[references[p] for p in own]]).score
    assert abs(mine - expected) > 0.1
