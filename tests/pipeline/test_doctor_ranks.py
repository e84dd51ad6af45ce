"""What a rank says when what it waits for never comes; tests/slurm/test_doctor.py has the rest, on a cluster."""

import subprocess
import sys

WAITING = """
import time
from datetime import timedelta
import torch.distributed as dist
from pipeline.doctor_ranks import Ranks, _all_reduce
from pipeline.slurm_job import Step

ranks = Ranks(Step(job="7", rank=0, local_rank=0, num_tasks=1, num_nodes=1, tasks_per_node=1, restarts=0))
ranks.store = dist.TCPStore("127.0.0.1", 0, is_master=True)
{before}
ranks.give_up_after(timedelta(seconds=0.5))
time.sleep(60) if {silent} else list(_all_reduce(ranks))
time.sleep(60)
"""


def said(before: str, silent: bool) -> str:
    code = WAITING.format(before=before, silent=silent)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    return done.stdout


def test_a_collective_that_does_not_end_is_named() -> None:
    """NCCL waits for ever where gloo gives up; a sleep stands for it here, where no GPU is."""
    hanging = said("dist.all_reduce = lambda _: time.sleep(60)", silent=False)
    assert hanging.startswith("WRONG all-reduce over gloo does not end; export GLOO_SOCKET_IFNAME=")
    assert "rank 0]" in hanging
    # The same all-reduce ends by itself, and what is waited for after it is rank 0.
    assert said("", silent=False).startswith("WRONG ranks 0 have stopped answering")
    assert said("", silent=True).startswith("WRONG ranks 0 have stopped answering")
