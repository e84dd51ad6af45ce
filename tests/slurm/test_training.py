"""slurm/train.sbatch on two and three nodes."""

from pathlib import Path

import pytest
import torch

from tests.conftest import pipeline
from tests.integration.runs import checkpoints
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import train, weights_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("nodes", [2, 3])
def test_nodes_are_equal_to_one_process(cluster: Cluster, recipe_file: Path, tmp_path: Path, nodes: int) -> None:
    # Adam would blow up the rounding of gradients that are zero, with the paper's epsilon.
    exact = ["--training.adam_epsilon", 1e-3]
    alone, together = tmp_path / "alone", tmp_path / "together"
    assert pipeline("fit", "--config", recipe_file, "--run.folder", alone, *exact).returncode == 0
    job = train(cluster, recipe_file, together, *exact, nodes=nodes)
    assert job.wait() == "COMPLETED", job.log
    assert [path.name for path in checkpoints(together)] == [path.name for path in checkpoints(alone)]
    ours, theirs = weights_of(together), weights_of(alone)
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-4, atol=1e-6)
