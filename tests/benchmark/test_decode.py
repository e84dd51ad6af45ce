"""`decode` on a tiny run, beside CTranslate2: its figures."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.inference.loading import load_translator
from pipeline.inference.options import SearchOptions
from tests.conftest import ROOT


@pytest.mark.slow
def test_figures_beside_a_baseline(trained_run: Path, tiny_corpus: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    lines = (tiny_corpus.parent / "validation.source").read_text().split("\n")[:20]
    text.write_text("\n".join([*lines, "", ""]))
    words = ["decode", "--beam", "1", str(trained_run), "--source", str(text), "--baseline", "ctranslate2"]
    answer = subprocess.run(
        [sys.executable, "-m", "tests.benchmark", *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    figures = json.loads(answer.stdout.splitlines()[-1])
    assert len(answer.stdout.splitlines()) == 1
    assert figures["sentences"] == 20  # empty lines are not translated
    assert (figures["beam_size"], figures["length_penalty"], figures["threads"]) == (1, 0.6, 1)
    found = load_translator(trained_run).translate(lines, SearchOptions(1))
    num_tokens = sum(translation.hypotheses[0].num_tokens for translation in found)
    assert figures["target_tokens_per_second"] * figures["seconds"] == pytest.approx(num_tokens, rel=1e-3)
    for one in (figures, figures["ctranslate2"]):
        assert one["sentences_per_second"] == pytest.approx(20 / one["seconds"], rel=1e-3)
        assert 0 < one["latency_median_seconds"] <= one["latency_p95_seconds"]
        assert one["peak_memory_bytes"] > 1e7
    # Each process has its own, not that of the command, which has started both.
    assert figures["peak_memory_bytes"] != figures["ctranslate2"]["peak_memory_bytes"]
    # Greedy translations are equal except for empty ones, which CTranslate2 forbids, and for endless repetition, where
    # rounding decides when to stop.
    num_comparable = sum(1 < translation.hypotheses[0].num_tokens < 60 for translation in found)
    assert num_comparable >= 12
    assert 20 * figures["same_as_ctranslate2"] >= num_comparable
    ratio = figures["ctranslate2"]["seconds"] / figures["seconds"]
    assert figures["ratio_to_ctranslate2"] == pytest.approx(ratio, rel=1e-3)
    assert "round 3 of 3: pipeline" in answer.stderr
