"""Two agents of torchrun, as on two machines: one rank is killed, both start again, and training goes on."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.integration.runs import checkpoints, step_of


@pytest.mark.slow
@pytest.mark.two_processors
@pytest.mark.timeout(300)
def test_a_killed_rank_starts_again_with_the_others(recipe_file: Path, tmp_path: Path) -> None:
    command = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:29473"]
    command += ["--rdzv-id", "mine", "--max-restarts", "3", "-m", "tests.integration.changed_program", "fit"]
    command += ["--config", str(recipe_file), "--trainer.num_nodes", "2", "--run.folder", str(tmp_path / "run")]
    changed = {"CHANGE": "kill_rank_0_once", "MARKER": str(tmp_path / "killed")}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **changed}
    logs = [tmp_path / f"agent{number}" for number in (0, 1)]
    agents = []
    for log in logs:
        with log.open("wb") as output:
            agent = [sys.executable, "-m", "torch.distributed.run", *command]
            agents.append(subprocess.Popen(agent, env=environment, stdout=output, stderr=output))
    try:
        assert [agent.wait(240) for agent in agents] == [0, 0]
    finally:
        for agent in agents:
            agent.kill()
    said = "".join(log.read_text(errors="replace") for log in logs)
    assert f"exitcode: {-signal.SIGKILL}" in said
    assert re.search(r"resuming from .*step=00000004", said) or said.count("training: from step 0") == 2
    assert step_of(checkpoints(tmp_path / "run")[-1]) == 12
