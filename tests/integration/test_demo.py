"""The demo, as `make demo` runs it."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.checkpointing.checkpoint import load_model, resolve_checkpoint
from pipeline.inference.pieces import encode_sources
from pipeline.inference.scoring import align_words
from tests.conftest import ROOT
from tests.fork_server import ForkServer
from tests.integration.demo_alignments import aligned_pairs, alignment_error


def demo(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ForkServer.shared().python, "-m", "pipeline", "demo"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **ForkServer.shared().for_children},
        capture_output=True,
        text=True,
        check=False,
    )


SLOW_SAVE = """
import pathlib, signal, sys, time

def save(*_):
    time.sleep(1)
    pathlib.Path("saved").touch()
    sys.exit(130)

signal.signal(signal.SIGINT, save)
pathlib.Path("begun").touch()
time.sleep(600)
"""


def test_ctrl_c_waits_for_the_command_to_save(tmp_path: Path) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    run_stage = f"d.run_stage('fit', ['-c', {SLOW_SAVE!r}])"
    code = f"import pathlib, pipeline.commands.demo as d; {run_stage}"
    running = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not (tmp_path / "begun").exists() and running.poll() is None:
        time.sleep(0.05)
    os.killpg(running.pid, signal.SIGINT)  # a terminal signals the process group
    assert running.communicate()[1].endswith("the demo stopped at 'fit'; run the demo again to continue\n")
    assert running.returncode == 130
    assert (tmp_path / "saved").exists()


@pytest.mark.slow
def test_the_demo_learns_its_grammar(tmp_path: Path) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    first = demo(tmp_path)
    assert first.returncode == 0, first.stderr
    scores = [float(score) for score in re.findall(r": BLEU ([\d.]+), chrF", first.stdout)]
    assert len(scores) == 2
    assert min(scores) >= 90
    for text in ("BLEU signature nrefs:1", "chrF signature", "translation ", "reference ", "tensorboard", "export"):
        assert text in first.stdout
    assert (tmp_path / "runs" / "demo" / "export" / "model.ts").exists()
    pairs = list(aligned_pairs(seed=2, count=500))
    model = load_model(resolve_checkpoint(tmp_path / "runs" / "demo"))
    source_lines, target_lines, *_ = zip(*pairs, strict=True)
    sources, targets = (encode_sources(model.tokenizer, lines, None)[0] for lines in (source_lines, target_lines))
    alignments = align_words(model.network, model.tokenizer, sources, targets, (source_lines, target_lines))
    assert alignment_error(pairs, alignments) < 0.1
    again = demo(tmp_path)
    assert again.returncode == 0
    assert "finished at step" in again.stderr  # nothing is trained twice
    assert again.stdout.partition("Scores")[2] == first.stdout.partition("Scores")[2]
