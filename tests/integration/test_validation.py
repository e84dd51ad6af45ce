"""Validation decodes each pair on one rank only, and its BLEU equals that of a single process."""

import json
from pathlib import Path

import pytest
import sacrebleu

from tests.integration.runs import start


@pytest.mark.slow
def test_bleu_over_two_ranks_is_bleu_on_one(trained_run: Path, tiny_corpus: Path, tmp_path: Path) -> None:
    checkpoint = trained_run / "checkpoints" / "best.ckpt"
    for ranks in (1, 2):
        process = start(checkpoint, tiny_corpus, ranks, tmp_path, module="tests.integration.validate_on_ranks")
        assert process.wait() == 0
    alone, first, second = (json.loads((tmp_path / name).read_text()) for name in ("1-0", "2-0", "2-1"))
    references = (tiny_corpus.parent / "validation.target").read_text().split("\n")[:-1]
    all_pairs = list(range(len(references)))
    assert sorted(alone["pairs"]) == sorted(first["pairs"] + second["pairs"]) == all_pairs
    assert 0.3 * len(all_pairs) < len(first["pairs"]) < 0.7 * len(all_pairs)

    translations = {**first["translations"], **second["translations"]}
    assert translations == alone["translations"]
    expected = sacrebleu.corpus_bleu([translations[str(pair)] for pair in all_pairs], [references]).score
    assert 1 < expected < 100
    for result in (alone, first, second):
        assert result["bleu"] == pytest.approx(expected, abs=1e-4)
        assert result["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    # The BLEU of one rank's pairs differs, so the ranks' counts were summed.
    pairs = first["pairs"]
    own_bleu = sacrebleu.corpus_bleu([translations[str(p)] for p in pairs], [[references[p] for p in pairs]]).score
    assert abs(own_bleu - expected) > 0.1
