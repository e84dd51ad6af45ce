"""Reading the job step from environment variables."""

import socket
from pathlib import Path

import pytest

from data_module.errors import InputError
from pipeline.runtime.slurm import clear_failure_count, current_step, node_name, report_mistake_to_script

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


def test_a_step_that_is_smaller_than_its_job() -> None:
    """Tasks per node are those of the step, or those of the job if srun does not set them for the step."""
    job = {**TASK, "SLURM_TASKS_PER_NODE": "4(x2),1", "SLURM_RESTART_COUNT": "0"}
    step = current_step(job)
    assert step is not None
    assert (step.num_tasks, step.num_nodes, step.tasks_per_node, step.restarts) == (6, 3, 2, 0)
    del job["SLURM_STEP_TASKS_PER_NODE"]
    job["SLURM_TASKS_PER_NODE"] = "1,1(x2)"
    step = current_step(job)
    assert step is not None
    assert (step.num_tasks, step.num_nodes, step.tasks_per_node) == (3, 3, 1)


def test_files_for_the_jobs_script(tmp_path: Path) -> None:
    mistake, failures = tmp_path / "mistake", tmp_path / "failures"
    failures.touch()
    report_mistake_to_script({})
    clear_failure_count({})
    assert list(tmp_path.iterdir()) == [failures]
    report_mistake_to_script({"MISTAKE_FILE": str(mistake)})
    for _ in range(2):  # every rank calls it
        clear_failure_count({"FAILURES_FILE": str(failures)})
    assert list(tmp_path.iterdir()) == [mistake]


def test_the_node_name_is_slurms() -> None:
    assert node_name({"SLURMD_NODENAME": "gpu-17"}) == "gpu-17"
    assert node_name({}) == socket.gethostname()


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
def test_environments_without_a_step(environment: dict[str, str]) -> None:
    assert current_step(environment) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"SLURM_STEP_ID": ""}, "not started by srun"),
        ({"SLURM_STEP_ID": "4294967290"}, "not started by srun"),
        ({"SLURM_STEP_ID": str(0xFFFFFFF0), "SLURM_NTASKS": "2"}, "not started by srun"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3"}, r"'2\(x3' is not understood"),
        ({"SLURM_JOB_NAME": "interactive"}, "named 'interactive'"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}, r"\[2, 2, 1\] tasks"),
    ],
)
def test_invalid_environments_are_refused(changed: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        current_step({**TASK, **changed})
