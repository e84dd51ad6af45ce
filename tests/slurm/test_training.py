"""slurm/train.sbatch on two nodes, and several steps of one job at the same time."""

from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT, pipeline
from tests.integration.runs import checkpoints
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import NO_GPUS, train, weights_of

pytestmark = pytest.mark.slow
EXTENDED = f"""
import sys

sys.path.insert(0, {str(ROOT)!r})
from pipeline.__main__ import main

print("EXTENDED", file=sys.stderr)
sys.exit(main())
"""


def test_nodes_are_equal_to_one_process(cluster: Cluster, tiny_corpus: Path, recipe_file: Path, tmp_path: Path) -> None:
    """With several tasks per node, from a staged corpus and another run's weights, by an extended program."""
    alone, together, parent = tmp_path / "alone", tmp_path / "together", tmp_path / "parent"
    assert pipeline("fit", "--config", recipe_file, "--run.folder", parent, "--run.seed", 7).returncode == 0
    # With the paper's epsilon, Adam would amplify rounding errors of gradients that are zero.
    exact = ["--training.adam_epsilon", 1e-3, "--trainer.precision", "64-true", "--init-from", parent]
    assert pipeline("fit", "--config", recipe_file, "--run.folder", alone, *exact).returncode == 0
    place, local = "# stage data/wmt14/en-de /local/corpus\n", tmp_path / "node" / "corpus"
    text = (ROOT / "slurm/train.sbatch").read_text()
    assert place in text
    script, program = tmp_path / "train.sbatch", tmp_path / "my_pipeline.py"
    script.write_text(text.replace(place, f"stage {tiny_corpus} {local}\n"))
    program.write_text(EXTENDED)
    options = {"sbatch": ["--ntasks-per-node=2"], "environment": {"PROGRAM": str(program)}, "script": script}
    job = train(cluster, recipe_file, together, *exact, "--corpus.folder", local, **options)
    assert job.wait() == "COMPLETED", job.log
    assert "EXTENDED" in job.log
    assert "Warning" not in job.log  # srun's, of numbers that exclude one another
    assert local.exists()
    assert job.log.count("starts from the weights of") == job.log.count("starting from the weights") == 1
    assert [path.name for path in checkpoints(together)] == [path.name for path in checkpoints(alone)]
    ours, theirs = weights_of(together), weights_of(alone)
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-9, atol=1e-12)


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
    """With a token for a step and without. A step whose ranks have two run folders ends, but no file says for good."""
    script = tmp_path / "job.sh"
    script.write_text(JOB.format(root=ROOT, python=cluster.forks["PYTHON"], recipe=recipe_file, folder=tmp_path))
    job = cluster.submit("--nodes=2", *NO_GPUS, script)
    assert job.wait() == "COMPLETED", job.log
    runs = [weights_of(tmp_path / name) for name in ("first", "second", "third", "alone")]
    equal = [all(torch.equal(run[name], runs[3][name]) for name in run) for run in runs]
    assert equal == [False, True, False, True]
    other = f"run.folder {tmp_path.resolve()}/other-1, not {tmp_path.resolve()}/other-0"
    assert f": rank 1 on 127.0.0.12 was started otherwise than rank 0: {other}; start all" in job.log
    assert "=> 1" in job.log
