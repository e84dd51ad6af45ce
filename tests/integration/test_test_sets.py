"""`evaluate --test-set`: a test set in sacreBLEU's folder, scored as sacreBLEU's own command scores it."""

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from sacrebleu.dataset import DATASETS

from pipeline.checkpointing.checkpoint import load_model, resolve_checkpoint
from pipeline.inference import evaluation_text
from tests.conftest import pipeline, refusal, sentences
from tests.pipeline.test_score import with_languages

OFFLINE = {"https_proxy": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9"}
"""A proxy that nothing listens at."""


@pytest.fixture(scope="module")
def model(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose recipe says that it translates from English to German."""
    trained = load_model(resolve_checkpoint(trained_run))
    return with_languages(trained, tmp_path_factory.mktemp("named") / "model.ckpt", "en", "de_DE")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """sacreBLEU's folder with a test set of two references: English with reversed words, and the English sentences."""
    folder = tmp_path / "sacrebleu"
    (folder / "wmt20" / "tworefs").mkdir(parents=True)
    lines = sentences(30, seed=7)
    fields = {"src": lines, "ref-0": [" ".join(reversed(line.split())) for line in lines], "ref-1": lines}
    fields |= dict.fromkeys(("docid", "genre", "origlang"), ["x"] * len(lines))
    for field, values in fields.items():
        path = folder / "wmt20" / "tworefs" / f"wmt20_tworefs.en-de.{field}"
        path.write_text("".join(line + "\n" for line in values))
    return folder


def test_scores_are_those_of_sacrebleus_command(model: Path, cache: Path, tmp_path: Path) -> None:
    environment = {**OFFLINE, "SACREBLEU": str(cache)}
    options = ["--test-set", "wmt20/tworefs", "--output", tmp_path / "output"]
    done = pipeline("evaluate", model, *options, environment=environment)
    assert done.returncode == 0, done.stderr.decode()
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["test_set"] == "wmt20/tworefs en-de"
    assert figures["sentences"] == 30
    words = ["-t", "wmt20/tworefs", "-l", "en-de", "-m", "bleu", "chrf", "-w", "4", "-i", tmp_path / "output"]
    command = [sys.executable, "-m", "sacrebleu", *words]
    theirs = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    bleu, chrf = json.loads(theirs.stdout)
    assert bleu["score"] > 1
    assert figures["bleu"] == pytest.approx(bleu["score"], abs=1e-4)
    assert figures["chrf"] == pytest.approx(chrf["score"], abs=1e-4)


def test_mistakes(model: Path, trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation_text, "SACREBLEU_DIR", str(tmp_path))
    for name, folder in (("_outdir", "wmt14/full"), ("_rawdir", "wmt14/full/raw")):
        monkeypatch.setattr(DATASETS["wmt14/full"], name, str(tmp_path / folder))
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(urllib.request, "_opener", None)  # It keeps the proxy that it finds at first.
    files = ["--source", model, "--reference", model]
    languages = "(corpus.source_language and corpus.target_language of the model); it has zh-en"
    there = "run sacrebleu -t wmt14/full -l en-de --echo src, and copy ~/.sacrebleu/wmt14/full from there to"
    for checkpoint, name, options, said in (
        (model, "wmt14/ful", [], "sacreBLEU has no such test set; did you mean wmt14/full?"),
        (model, "#", [], "`sacrebleu --list` lists them"),
        (model, "wmt14/full", files, "error: --test-set: cannot be given with --source"),
        (model, "wmt17/ms", [], f"error: --test-set wmt17/ms: has no en-de {languages}"),
        (trained_run, "wmt14/full", [], "has no source-target (corpus.source_language"),
        (model, "wmt14/full", [], f"wmt14/full: is not in {tmp_path}/wmt14/full and cannot be downloaded ("),
        (model, "wmt14/full", [], there),
        (model, "wmt14/full", [], "set SACREBLEU"),
    ):
        assert said in refusal("evaluate", checkpoint, "--test-set", name, *options)
