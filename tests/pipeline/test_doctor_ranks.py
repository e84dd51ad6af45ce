"""What a rank says when what it waits for never comes; tests/slurm/test_doctor.py has the rest, on a cluster."""

import subprocess
import sys

RANK = """
import time
from datetime import timedelta
import torch.distributed as dist
from pipeline.doctor_ranks import Ranks, _all_reduce
from pipeline.slurm_job import Step

ranks = Ranks(Step(job="7", rank=0, local_rank=0, num_tasks=1, num_nodes=1, tasks_per_node=1, restarts=0))
ranks.store = dist.TCPStore("127.0.0.1", 0, is_master=True)
"""
GIVE_UP = "ranks.give_up_after(timedelta(seconds=3))"


def said(*lines: str) -> str:
    """By a rank that does this and then waits."""
    code = RANK + "\n".join([*lines, "time.sleep(60)"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    return done.stdout


def test_a_collective_that_does_not_end_is_named() -> None:
    """NCCL waits for ever where gloo gives up; a sleep stands for it here, where no GPU is."""
    hanging = said("dist.all_reduce = lambda _: time.sleep(60)", GIVE_UP, "list(_all_reduce(ranks))")
    assert hanging.startswith("WRONG all-reduce over gloo does not end; export GLOO_SOCKET_IFNAME=")
    assert "rank 0]" in hanging
    # Where it has ended, rank 0 is waited for.
    assert said("list(_all_reduce(ranks))", GIVE_UP).startswith("WRONG ranks 0 have stopped answering")
    assert said(GIVE_UP).startswith("WRONG ranks 0 have stopped answering")
