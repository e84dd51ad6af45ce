"""Processes that start at the same time: one prepares the corpus, and one writes to the run folder.

test_fit.py has two ranks of Lightning's launcher, tests/slurm those of SLURM; here, torchrun starts them.
"""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.fork_server import ForkServer
from tests.integration.runs import checkpoints, is_same_corpus, kill, start, step_of
from tests.slurm.links import free_ports


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


@pytest.mark.slow
@pytest.mark.two_processors
def test_a_killed_rank_starts_again_with_the_others(tiny_corpus: Path, recipe_file: Path, tmp_path: Path) -> None:
    """By two agents of torchrun, as on two machines, which start at the same time. Then training goes on."""
    command = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "mine"]
    command += ["--rdzv-endpoint", f"127.0.0.1:{free_ports(1)[0]}", "--max-restarts", "3"]
    command += ["-m", "tests.integration.changed_program", "fit", "--config", str(recipe_file)]
    command += ["--trainer.num_nodes", "2", "--run.folder", str(tmp_path / "run")]
    command += ["--corpus.folder", str(tmp_path / "corpus")]
    changed = {"CHANGE": "kill_rank_0_once", "MARKER": str(tmp_path / "killed")}
    python = ForkServer.shared().python
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHON_EXEC": python, **changed}
    logs = [tmp_path / f"agent{number}" for number in (0, 1)]
    agents = []
    for log in logs:
        with log.open("wb") as output:
            agent = [python, "-m", "torch.distributed.run", *command]
            agents.append(subprocess.Popen(agent, env=environment, stdout=output, stderr=output))
    try:
        assert [agent.wait() for agent in agents] == [0, 0]
    finally:
        for agent in agents:
            agent.kill()
    said = "".join(log.read_text(errors="replace") for log in logs)
    assert f"exitcode: {-signal.SIGKILL}" in said
    assert re.search(r"resuming from .*step=00000004", said) or said.count("training: from step 0") == 2
    assert step_of(checkpoints(tmp_path / "run")[-1]) == 12
    assert is_same_corpus(tmp_path / "corpus", tiny_corpus)
