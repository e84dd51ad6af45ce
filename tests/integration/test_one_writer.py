"""Processes that start at the same time: one prepares the corpus, and one writes to the run folder."""

import subprocess
import time
from pathlib import Path

import pytest

from tests.integration.runs import checkpoints, kill, start, step_of


def is_same_corpus(left: Path, right: Path) -> bool:
    """Check that two folders hold the same files, with no temporary files beside them."""
    names = {path.name for path in left.iterdir()}
    assert names == {path.name for path in right.iterdir()}
    assert not list(left.parent.glob(".corpus.*"))
    return all((left / name).read_bytes() == (right / name).read_bytes() for name in names)


def test_two_fits_started_at_once_without_a_corpus(tiny_corpus: Path, recipe_file: Path, tmp_path: Path) -> None:
    corpus, run = tmp_path / "corpus", tmp_path / "run"
    command = ["fit", "--config", recipe_file, "--corpus.folder", corpus, "--run.folder", run]
    fits = [start(*command, "--trainer.max_steps", 100_000, stderr=subprocess.PIPE) for _ in range(2)]
    try:
        while all(fit.poll() is None for fit in fits):
            time.sleep(0.05)
        while not checkpoints(run) and any(fit.poll() is None for fit in fits):
            time.sleep(0.05)
    finally:
        was_running = [kill(fit) for fit in fits]
        messages = [fit.communicate()[1] or b"" for fit in fits]
    assert sorted(was_running) == [False, True]
    refused = was_running.index(False)
    assert fits[refused].returncode == 2
    line = messages[refused].decode().splitlines()[-1]
    assert line.startswith(f"error: {run}: another fit is writing to it; ")
    assert is_same_corpus(corpus, tiny_corpus)


@pytest.mark.parametrize("launcher", ["lightning", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_two_ranks_started_without_a_corpus(
    tiny_corpus: Path, recipe_file: Path, tmp_path: Path, launcher: str
) -> None:
    corpus, run = tmp_path / "corpus", tmp_path / "run"
    command = ["fit", "--config", recipe_file, "--corpus.folder", corpus, "--run.folder", run, "--trainer.devices", 2]
    if launcher == "torchrun":  # it starts both ranks at the same time, as a cluster does
        ranks = start("--standalone", "--nproc-per-node", 2, "-m", "pipeline", *command, module="torch.distributed.run")
    else:
        ranks = start(*command)
    assert ranks.wait(120) == 0
    assert is_same_corpus(corpus, tiny_corpus)
    assert [step_of(path) for path in checkpoints(run)] == [4, 8, 12]
