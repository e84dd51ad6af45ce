"""Submit training jobs and read their logs and runs."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tests.integration.runs import checkpoints, step_of
from tests.slurm.cluster import Cluster, Job

NO_GPUS = ["--gpus-per-node=0", "--ntasks-per-node=1", "--cpus-per-task=1", "--time=30"]
"""Options of sbatch for this cluster."""


SLOWLY = {"PROGRAM": "-m tests.slurm.slow_ranks"}
"""Environment for ranks that are out of step and log where they are; see slow_ranks.py."""


def train(
    cluster: Cluster,
    recipe: Path,
    run: Path,
    *options: object,
    nodes: int | str = 2,
    sbatch: Sequence[str] = (),
    environment: dict[str, str] | None = None,
    script: Path | str = "slurm/train.sbatch",
) -> Job:
    """Submit `slurm/train.sbatch RECIPE ...`."""
    command = [f"--nodes={nodes}", *NO_GPUS, *sbatch, script, recipe, "--run.folder", run, *options]
    return cluster.submit(*command, **cluster.forks, **(environment or {}))


def resumed_from(job: Job) -> list[int]:
    return [step_of(Path(line.split()[-1])) for line in job.log.splitlines() if line.startswith("resuming from")]


def saved_after(job: Job) -> list[int]:
    return [
        int(line.split("saved after step ")[1].split(";")[0])
        for line in job.log.splitlines()
        if "saved after step" in line
    ]


def wait_until_saved(job: Job, run: Path, step: int) -> None:
    job.wait_until(lambda: any(step_of(path) >= step for path in checkpoints(run)), f"saved step {step}")


def weights_of(run: Path) -> dict[str, Tensor]:
    return torch.load(checkpoints(run)[-1], weights_only=True)["state_dict"]
