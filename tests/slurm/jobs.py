"""Training jobs to submit, and what their runs have left."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tests.integration.runs import checkpoints
from tests.slurm.cluster import Cluster, Job

NO_GPUS = ["--gpus-per-node=0", "--ntasks-per-node=1", "--cpus-per-task=1", "--time=30"]
"""What a user gives sbatch on a cluster like this one."""


HERE = Path(__file__).resolve().parent


def train(
    cluster: Cluster,
    recipe: Path,
    run: Path,
    *options: object,
    nodes: int | str = 2,
    sbatch: Sequence[str] = (),
    environment: dict[str, str] | None = None,
) -> Job:
    """`sbatch slurm/train.sbatch RECIPE ...`."""
    command = [f"--nodes={nodes}", *NO_GPUS, *sbatch, "slurm/train.sbatch", recipe, "--run.folder", run, *options]
    return cluster.submit(*command, **(environment or {}))


def weights_of(run: Path) -> dict[str, Tensor]:
    """Those of the newest checkpoint."""
    return torch.load(checkpoints(run)[-1], weights_only=True)["state_dict"]
