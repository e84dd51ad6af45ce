"""The job step as its environment tells it."""

import pytest

from data_module.errors import InputError
from pipeline.slurm_job import current_step, mistakes

TASK = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NAME": "train",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "6",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
}


def test_a_task_of_a_step() -> None:
    step = current_step({**TASK, "SLURM_RESTART_COUNT": "3"})
    assert step is not None
    assert (step.job, step.rank, step.local_rank, step.restarts) == ("7", 5, 1, 3)
    assert (step.num_tasks, step.num_nodes, step.tasks_per_node) == (6, 3, 2)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1"},  # a batch script of one task, without srun
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "4294967290"},  # the shell of salloc
        {**TASK, "SLURM_NTASKS": "1", "SLURM_JOB_NAME": "bash"},  # srun --pty bash
        {**TASK, "TORCHELASTIC_RUN_ID": "none"},  # torchrun inside a job
    ],
)
def test_no_step(environment: dict[str, str]) -> None:
    assert current_step(environment) is None


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"SLURM_STEP_ID": ""}, "not started by srun"),
        ({"SLURM_STEP_ID": "4294967290"}, "not started by srun"),
        ({"SLURM_JOB_NAME": "interactive"}, "named 'interactive'"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}, r"\[2, 2, 1\] tasks"),
    ],
)
def test_started_the_wrong_way(changed: dict[str, str], said: str) -> None:
    assert len(mistakes({**TASK, **changed})) == 1
    with pytest.raises(InputError, match=said):
        current_step({**TASK, **changed})
