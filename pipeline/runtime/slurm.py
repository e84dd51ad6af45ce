"""What SLURM says of this process, from its environment alone; no torch, no Lightning.

Nodes, tasks and ranks come from the job and from nowhere else, so that a recipe runs on any number of them.
"""

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from data_module.errors import InputError

_SHELLS = ("bash", "interactive")
"""Job names that stand for a shell someone types in, by Lightning's convention and by SLURM's defaults."""
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Step numbers from here on are SLURM's own: the batch script, the shell of salloc."""

MISTAKE_FILE = "MISTAKE_FILE"
"""Names a file that tells the job's script of a user's mistake: srun's own exit code is that of the ranks it killed."""

FAILURES_FILE = "FAILURES_FILE"
"""Names a file in which the job's script counts failures, as long as no training has begun."""


@dataclass(frozen=True)
class JobStep:
    """The job step that this process is a task of."""

    job: str
    rank: int
    local_rank: int
    """Its place among its node's tasks."""
    num_tasks: int
    num_nodes: int
    tasks_per_node: int
    restarts: int
    """How often the job was requeued."""


def mistakes(environment: Mapping[str, str] = os.environ) -> list[str]:
    """What is wrong with the way this process was started inside a job; each with the way out."""
    if not _in_job(environment) or int(environment.get("SLURM_NTASKS", 1)) == 1:
        return []
    tasks, name = environment["SLURM_NTASKS"], environment.get("SLURM_JOB_NAME")
    if name in _SHELLS:
        return [
            f"the job is named '{name}', which stands for a shell: all its {tasks} tasks would take themselves for "
            "rank 0; give it another --job-name"
        ]
    if not _in_step(environment):
        return [f"the job has {tasks} tasks and this process was not started by srun; start it with srun"]
    counts = _tasks_by_node(environment)
    if len(set(counts)) > 1:
        return [f"the step has {counts} tasks on its nodes; give every node as many, with --ntasks-per-node"]
    return []


def current_step(environment: Mapping[str, str] = os.environ) -> JobStep | None:
    """The step that srun has started this process in; None outside a job, or where one process is all there is.

    Raises InputError for what `mistakes` finds.
    """
    if found := mistakes(environment):
        raise InputError(found[0])
    if not _in_step(environment) or environment.get("SLURM_JOB_NAME") in _SHELLS:
        return None
    counts = _tasks_by_node(environment)
    return JobStep(
        job=environment["SLURM_JOB_ID"],
        rank=int(environment["SLURM_PROCID"]),
        local_rank=int(environment["SLURM_LOCALID"]),
        num_tasks=sum(counts),
        num_nodes=len(counts),
        tasks_per_node=counts[0],
        restarts=int(environment.get("SLURM_RESTART_COUNT", 0)),
    )


def node_name(environment: Mapping[str, str] = os.environ) -> str:
    """This node, as SLURM calls it."""
    return environment.get("SLURMD_NODENAME") or socket.gethostname()


def report_mistake_to_script(environment: Mapping[str, str] = os.environ) -> None:
    """Leave the file that keeps the job's script from starting the same again."""
    if name := environment.get(MISTAKE_FILE):
        Path(name).touch()


def clear_failure_count(environment: Mapping[str, str] = os.environ) -> None:
    """Training begins, and counts by itself from now on."""
    if name := environment.get(FAILURES_FILE):
        Path(name).unlink(missing_ok=True)


def _in_job(environment: Mapping[str, str]) -> bool:
    # torchrun gives ranks of its own, inside a job as well.
    return "SLURM_JOB_ID" in environment and "TORCHELASTIC_RUN_ID" not in environment


def _in_step(environment: Mapping[str, str]) -> bool:
    step = environment.get("SLURM_STEP_ID", "")
    return _in_job(environment) and step.isdigit() and int(step) < _FIRST_SPECIAL_STEP


def _tasks_by_node(environment: Mapping[str, str]) -> list[int]:
    """SLURM's short form written out: 2(x3),1 is [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", "1")).split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            raise InputError(f"SLURM_STEP_TASKS_PER_NODE '{part}' is not understood; start the step with srun")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts
