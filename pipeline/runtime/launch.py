"""How this process was launched: its rank, and whether its exit code is the job's."""

import os

from pipeline.runtime.slurm import is_task


def process_rank() -> int:
    """Return this process's global rank, before Lightning has set anything up."""
    # Lightning's own launcher sets LOCAL_RANK, also inside an interactive SLURM job, where SLURM_PROCID is 0 for all.
    for names in (("RANK",), ("LOCAL_RANK", "NODE_RANK"), ("SLURM_PROCID",)):
        if os.environ.get(names[0], "").isdigit():
            return sum(int(os.environ.get(name, 0)) for name in names)
    return 0


def local_rank() -> int:
    """Return this process's rank on its node, before Lightning has set anything up."""
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 0


def reports_exit_code(rank: int) -> bool:
    """Return whether this rank's exit code counts.

    Under Lightning's own launcher only that of rank 0 does: the launcher takes another rank's nonzero exit code for a
    crash and kills rank 0.
    """
    launched_by_lightning = "LOCAL_RANK" in os.environ and "RANK" not in os.environ and not is_task()
    return rank == 0 or not launched_by_lightning
