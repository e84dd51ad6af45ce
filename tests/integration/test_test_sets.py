"""`evaluate --test-set`: a test set in sacreBLEU's folder, scored as sacreBLEU's own command scores it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.checkpointing.checkpoint import load_model, resolve_checkpoint
from tests.conftest import ROOT, pipeline, sentences
from tests.pipeline.test_score import with_languages

OFFLINE = {"https_proxy": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9"}
"""A proxy that nothing listens at."""


@pytest.fixture(scope="module")
def model(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose recipe says that it translates from English to German."""
    trained = load_model(resolve_checkpoint(trained_run))
    return with_languages(trained, tmp_path_factory.mktemp("named") / "model.ckpt", "en", "de_DE")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """sacreBLEU's folder with `wmt14/full`, whose German is English with reversed words, and `wmt20/tworefs`, whose
    second references are the English sentences."""
    folder = tmp_path_factory.mktemp("sacrebleu")
    lines = sentences(30, seed=7)
    reversed_lines = [" ".join(reversed(line.split())) for line in lines]
    for name, references in (("wmt14/full", ["ref"]), ("wmt20/tworefs", ["ref-0", "ref-1"])):
        (folder / name).mkdir(parents=True)
        fields = {"src": lines, **dict(zip(references, (reversed_lines, lines), strict=False))}
        for field in ("docid", "genre", "origlang"):
            fields[field] = ["x"] * len(lines)
        for field, values in fields.items():
            path = folder / name / f"{name.replace('/', '_')}.en-de.{field}"
            path.write_text("".join(line + "\n" for line in values))
    return folder


def errors(cache: Path, *options: list[object]) -> list[str]:
    """Call `evaluate` with each list of words, in one process, as sacreBLEU reads its folder's name once."""
    lists = json.dumps([[*map(str, one)] for one in options])
    code = f"from tests.conftest import refusal\nfor one in {lists}: print(refusal('evaluate', *one))"
    environment = {**os.environ, **OFFLINE, "SACREBLEU": str(cache), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", ["wmt14/full", "wmt20/tworefs"])
def test_scores_are_those_of_sacrebleus_command(name: str, model: Path, cache: Path, tmp_path: Path) -> None:
    environment = {**OFFLINE, "SACREBLEU": str(cache)}
    options = ["--test-set", name, "--output", tmp_path / "output"]
    done = pipeline("evaluate", model, *options, environment=environment)
    assert done.returncode == 0, done.stderr.decode()
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["test_set"] == f"{name} en-de"
    assert figures["sentences"] == 30
    theirs = subprocess.run(
        [
            sys.executable,
            "-m",
            "sacrebleu",
            *["-t", name, "-l", "en-de", "-m", "bleu", "chrf", "-w", "4", "-i"],
            tmp_path / "output",
        ],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    bleu, chrf = json.loads(theirs.stdout)
    assert bleu["score"] > 1
    assert figures["bleu"] == pytest.approx(bleu["score"], abs=1e-4)
    assert figures["chrf"] == pytest.approx(chrf["score"], abs=1e-4)


def test_mistakes(model: Path, trained_run: Path, cache: Path, tmp_path: Path) -> None:
    files = ["--source", model, "--reference", model]
    misspelt, no_name, twice, lacks, no_languages = errors(
        cache,
        [model, "--test-set", "wmt14/ful"],
        [model, "--test-set", "#"],
        [model, "--test-set", "wmt14/full", *files],
        [model, "--test-set", "wmt17/ms"],
        [trained_run, "--test-set", "wmt14/full"],
    )
    assert misspelt == ("error: --test-set wmt14/ful: sacreBLEU has no such test set; did you mean wmt14/full?")
    assert "`sacrebleu --list` lists them" in no_name
    assert "--test-set: cannot be given with --source" in twice
    assert lacks == (
        "error: --test-set wmt17/ms: has no en-de (corpus.source_language and corpus.target_language of the model); it"
        " has zh-en"
    )
    assert "--test-set wmt14/full: has no source-target (corpus.source_language" in no_languages
    [absent] = errors(tmp_path, [model, "--test-set", "wmt14/full"])
    assert absent.startswith(
        f"error: --test-set wmt14/full: is not in {tmp_path}/wmt14/full and cannot be downloaded ("
    )
    assert "run sacrebleu -t wmt14/full -l en-de --echo src, and copy ~/.sacrebleu/wmt14/full from there to" in absent
    assert "set SACREBLEU" in absent
