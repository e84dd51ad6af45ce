"""Several steps of one job at the same time."""

import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import NO_GPUS, weights_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

JOB = """#!/bin/bash
cd {root}
fit() {{ srun --overlap --nodes=2 --ntasks=2 "$@"; }}
one="{python} -m pipeline fit --config {recipe} --trainer.max_steps 3 --run.folder {folder}"
RANKS_TOKEN=$(uuidgen) fit $one/first --run.seed 1 & fit $one/second --run.seed 2 & fit $one/third --run.seed 3 & wait
fit $one/alone --run.seed 2
fit bash -c "exec $one/other-\\$SLURM_PROCID"
echo "=> $?"
"""


def test_steps_of_one_job_do_not_mix(cluster: Cluster, recipe_file: Path, tmp_path: Path) -> None:
    """With a token for a step and without; a step whose ranks have two run folders ends."""
    script = tmp_path / "job.sh"
    script.write_text(JOB.format(root=ROOT, python=sys.executable, recipe=recipe_file, folder=tmp_path))
    job = cluster.submit("--nodes=2", *NO_GPUS, script)
    assert job.wait(800) == "COMPLETED", job.log
    runs = [weights_of(tmp_path / name) for name in ("first", "second", "third", "alone")]
    equal = [all(torch.equal(run[name], runs[3][name]) for name in run) for run in runs]
    assert equal == [False, True, False, True]
    other = f"run.folder {tmp_path.resolve()}/other-1, not {tmp_path.resolve()}/other-0"
    assert f"error: rank 1 on 127.0.0.12 was started otherwise than rank 0: {other}; start all" in job.log
    assert "=> 2" in job.log
    assert not list(tmp_path.glob("*/.ranks-*"))
