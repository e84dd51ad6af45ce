"""Training jobs to submit, and what their runs have left."""

from pathlib import Path

import torch
from torch import Tensor

from tests.integration.runs import checkpoints
from tests.slurm.cluster import Cluster, Job

NO_GPUS = ["--gpus-per-node=0", "--ntasks-per-node=1", "--cpus-per-task=1", "--time=30"]
"""What a user gives sbatch on a cluster like this one."""


def train(cluster: Cluster, recipe: Path, run: Path, *options: object, nodes: int = 2, sbatch: tuple = ()) -> Job:
    """`sbatch slurm/train.sbatch RECIPE ...`."""
    return cluster.submit(
        f"--nodes={nodes}", *NO_GPUS, *sbatch, "slurm/train.sbatch", recipe, "--run.folder", run, *options
    )


def weights_of(run: Path) -> dict[str, Tensor]:
    """Those of the newest checkpoint."""
    return torch.load(checkpoints(run)[-1], weights_only=True)["state_dict"]
