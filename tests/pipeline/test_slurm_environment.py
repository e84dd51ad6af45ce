"""Reading the job step from environment variables."""

import fcntl
import functools
import os
import pty
import shutil
import socket
import subprocess
import termios
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from data_module.errors import InputError
from pipeline.runtime import launch
from pipeline.runtime.launch import (
    _PLACE,
    clear_failure_count,
    current_job_step,
    main_address,
    main_ports,
    report_mistake_to_script,
)
from pipeline.training.trainer import cluster_environment, make_trainer, trainer_options
from tests.conftest import refusal, run_here

TASK = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5"}
TASK |= {"SLURM_LOCALID": "1", "SLURM_NTASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "2(x3)"}


def test_a_task_of_a_step() -> None:
    step = current_job_step({**TASK, "SLURM_RESTART_COUNT": "3", "RESTARTS_IN_JOB": "2", "SLURM_NODEID": "2"})
    assert step is not None
    assert (step.job, step.rank, step.local_rank, step.restarts) == ("7", 5, 1, 5)
    assert (step.num_tasks, step.num_nodes, step.tasks_per_node, step.node) == (6, 3, 2, 2)
    environment = cluster_environment(step)
    assert (environment.world_size(), environment.global_rank()) == (6, 5)
    assert (environment.local_rank(), environment.node_rank()) == (1, 2)


def test_a_step_that_is_smaller_than_its_job() -> None:
    """Tasks per node are those of the step, or those of the job if srun does not set them for the step."""
    job = {**TASK, "SLURM_TASKS_PER_NODE": "4(x2),1", "SLURM_RESTART_COUNT": "0"}
    step = current_job_step(job)
    assert step is not None
    assert (step.num_tasks, step.num_nodes, step.tasks_per_node, step.restarts) == (6, 3, 2, 0)
    del job["SLURM_STEP_TASKS_PER_NODE"]
    job["SLURM_TASKS_PER_NODE"] = "1,1(x2)"
    step = current_job_step(job)
    assert step is not None
    assert (step.num_tasks, step.num_nodes, step.tasks_per_node) == (3, 3, 1)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("rack[1-2]n[01-02]", "rack1n01"),
        ("a[7,9-10],b3", "a7"),
        ("127.0.0.[11-12]", "127.0.0.11"),
        ("node5,node7", "node5"),
    ],
)
def test_rank_0_listens_on_the_first_node_of_the_step(nodes: str, first: str, tmp_path: Path) -> None:
    if "[" in nodes and shutil.which("scontrol") is None:
        pytest.skip("SLURM is not installed: apt-get install slurm-wlm")
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=test\nSlurmctldHost=localhost\n")
    environment = {"PATH": os.environ["PATH"], "SLURM_CONF": str(conf), "SLURM_STEP_NODELIST": nodes}
    assert main_address(2, {**environment, "SLURM_JOB_NODELIST": "node0"}) == first
    assert main_address(1, environment) == "127.0.0.1"
    for number in (1, 2):
        assert main_address(number, {**environment, "MASTER_ADDR": "10.0.0.1"}) == "10.0.0.1"


@pytest.mark.parametrize("nodes", ["rack[1-2]n[01-02]", ""])
def test_a_first_node_that_slurm_does_not_tell(nodes: str, tmp_path: Path) -> None:
    """As in a container without SLURM's programs."""
    with pytest.raises(InputError, match=r"^SLURM_STEP_NODELIST .*; export MASTER_ADDR=its name or address$") as error:
        main_address(2, {"PATH": str(tmp_path), "SLURM_STEP_NODELIST": nodes})
    assert nodes in str(error.value)


def test_the_port_of_a_job() -> None:
    assert main_ports({"SLURM_JOB_ID": "1234567"}) == list(range(19_567, 19_583))
    assert main_ports({"SLURM_JOB_ID": "7", "MASTER_PORT": "29500"}) == [29_500]
    for wrong in ("none", "0", "65536", "-1"):
        with pytest.raises(InputError, match=rf"^MASTER_PORT '{wrong}' is not a port"):
            main_ports({"SLURM_JOB_ID": "7", "MASTER_PORT": wrong})


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


@pytest.fixture
def tasks() -> Iterator[tuple[str, str]]:
    """The ids of a process with a terminal of its own, as `srun --pty` starts the first task, and of one without."""
    leader, follower = pty.openpty()
    take_terminal = functools.partial(fcntl.ioctl, 0, termios.TIOCSCTTY, 0)
    with (
        subprocess.Popen(["cat"], stdin=follower, start_new_session=True, preexec_fn=take_terminal) as terminal,
        subprocess.Popen(["cat"], stdin=subprocess.PIPE, start_new_session=True) as plain,
    ):
        yield str(terminal.pid), str(plain.pid)
        terminal.kill()
        plain.kill()
    os.close(leader)
    os.close(follower)


def test_a_terminal_is_no_task(tasks: tuple[str, str]) -> None:
    """Whatever the job's name: that of an interactive one is the shell's."""
    terminal_task, plain_task = tasks
    inside = {**TASK, "SLURM_PTY_PORT": "41353"}
    for name in ("bash", "zsh", "python3", "interactive"):
        shell = {**inside, "SLURM_JOB_NAME": name, "SLURM_TASK_PID": terminal_task}
        assert current_job_step({**shell, "SLURM_NTASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}) is None
        with pytest.raises(InputError, match=r"^the step has 6 tasks, and only this one .*; start ranks with srun"):
            current_job_step(shell)
        # A step that is started from the shell, and a batch job of that name.
        assert current_job_step({**inside, "SLURM_JOB_NAME": name, "SLURM_TASK_PID": plain_task}) is not None
        assert current_job_step({**TASK, "SLURM_JOB_NAME": name}) is not None


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_NTASKS": ""},  # which srun reads, outside a job
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1"},  # a batch script of one task, without srun
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "4294967290"},  # the shell of salloc
        {**TASK, "TORCHELASTIC_RUN_ID": "none"},  # torchrun inside a job
    ],
)
def test_environments_without_a_step(environment: dict[str, str]) -> None:
    assert current_job_step(environment) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"SLURM_STEP_ID": ""}, "not started by srun"),
        ({"SLURM_STEP_ID": "4294967290"}, "not started by srun"),
        ({"SLURM_STEP_ID": str(0xFFFFFFF0), "SLURM_NTASKS": "2"}, "not started by srun"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3"}, r"'2\(x3' is not understood"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}, r"\[2, 2, 1\] tasks"),
    ],
)
def test_invalid_environments_are_refused(changed: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        current_job_step({**TASK, **changed})


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({}, None),
        ({"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "3"}, None),  # Nothing reads WORLD_SIZE here.
        ({"RANK": "-1", "LOCAL_RANK": "-1"}, None),
        ({"RANK": "0"}, "RANK is 0, but this process would be rank 5 of 6: unset RANK,"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK is 0, but .*: unset LOCAL_RANK,"),
        ({"RANK": "5", "LOCAL_RANK": "0"}, "LOCAL_RANK is 0, but .*: unset RANK LOCAL_RANK,"),
        ({"RANK": ""}, "RANK '' is no rank; unset RANK$"),
    ],
)
def test_a_variable_that_gives_a_task_another_rank_is_refused(changed: dict[str, str], wrong: str | None) -> None:
    with pytest.raises(InputError, match=f"^{wrong}") if wrong else nullcontext():
        assert current_job_step({**TASK, **changed}) is not None


TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
LSF = {"LSB_JOBID": "7", "LSB_DJOB_RANKFILE": "RANKS"}
LSF |= {f"JSM_NAMESPACE_{name}": value for name, value in {"LOCAL_RANK": "1", "SIZE": "2", "RANK": "1"}.items()}
CHILD = {"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}
"""What Lightning sets for a rank that it starts."""
SALLOC = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "4294967290"}
TERMINAL = SALLOC | {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_PTY_PORT": "4000"}
BY_HAND = CHILD | {"RANK": "1"}


@pytest.fixture
def no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this process were no rank, and restore what Lightning sets."""
    for name in (*_PLACE, "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("no_place")
@pytest.mark.parametrize(
    ("variables", "devices", "rank", "wrong"),
    [
        *((variables, devices, 0, None) for variables in ({}, SALLOC, TERMINAL) for devices in (1, 2)),
        (TORCHRUN, 1, 0, None),
        (CHILD, 2, 1, None),
        (TERMINAL | CHILD, 2, 1, None),
        (BY_HAND, 2, 1, None),
        # Nothing reads these.
        *(
            (dict.fromkeys(names.split(), "2"), 1, 0, None)
            for names in ("NODE_RANK", "GROUP_RANK LOCAL_WORLD_SIZE", "WORLD_SIZE", "SLURM_NTASKS")
        ),
        ({"LOCAL_RANK": "-1"}, 1, 0, None),
        ({"RANK": "1"}, 1, 1, "RANK is 1, but this process would be rank 0 of 1: unset RANK, or"),
        ({"LOCAL_RANK": "1"}, 1, 1, "LOCAL_RANK is 1, but this process would be rank 0 of 1: unset LOCAL_RANK, or"),
        ({"LOCAL_RANK": "0", "NODE_RANK": "1"}, 1, 1, "NODE_RANK is 1, but .*: unset LOCAL_RANK NODE_RANK, or"),
        ({"SLURM_PROCID": "1"}, 1, 1, "SLURM_PROCID is 1, but .*: unset SLURM_PROCID, or"),
        ({"RANK": "-1", "SLURM_PROCID": "1"}, 1, 1, "SLURM_PROCID is 1, but .*: unset RANK SLURM_PROCID, or"),
        ({"JSM_NAMESPACE_RANK": "1"}, 1, 0, "JSM_NAMESPACE_RANK is 1, but .*: unset JSM_NAMESPACE_RANK, or"),
        ({"RANK": "0", "WORLD_SIZE": "4"}, 1, 0, "WORLD_SIZE is 4, but this process would be rank 0 of 1: unset RANK"),
        (CHILD, 1, 1, "LOCAL_RANK is 1"),
        (CHILD | {"LOCAL_RANK": "0"}, 1, 0, "WORLD_SIZE is 2"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, 2, 0, "RANK is 0, but this process would be rank 0 of 2: unset RANK"),
        ({"NODE_RANK": "1"}, 2, 0, "NODE_RANK is 1, but this process would be rank 2 of 2: unset NODE_RANK, or"),
        ({"GROUP_RANK": "1"}, 2, 0, "GROUP_RANK is 1, but this process would be rank 2 of 2: unset GROUP_RANK, or"),
        ({"LOCAL_RANK": "0"}, 2, 0, "LOCAL_RANK is set, so this process does not .*: unset LOCAL_RANK if nothing else"),
        ({"LOCAL_RANK": "-1", "MASTER_PORT": "29555"}, 2, 0, "LOCAL_RANK is -1"),
        (
            TORCHRUN | {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"},
            1,
            1,
            "LOCAL_RANK is 1, .* TORCHELASTIC_RUN_ID",
        ),
        (TORCHRUN, 2, 0, "WORLD_SIZE is 1, but this process would be rank 0 of 2"),
        ({"TORCHELASTIC_RUN_ID": "none"}, 1, 0, "RANK is not set, but TORCHELASTIC_RUN_ID is; unset it"),
        (LSF, 1, 0, "LSFEnvironment says that this process is rank 1 of 2, and RANK does not"),
        (LSF | {"RANK": "1"}, 1, 1, "RANK is 1, but this process would be rank 0 of 1"),
    ],
)
def test_variables_that_give_a_process_another_place_are_refused(
    variables: dict[str, str],
    devices: int,
    rank: int,
    wrong: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else it would train alone, without a word and without a file; what launchers set passes."""
    (tmp_path / "ranks").write_text("\n".join([socket.gethostname()] * 3))
    for name, value in variables.items():
        monkeypatch.setenv(name, value.replace("RANKS", str(tmp_path / "ranks")))
    monkeypatch.setattr(launch, "_in_terminal", lambda environment: "SLURM_PTY_PORT" in environment)
    assert launch.process_rank() == rank
    assert current_job_step() is None
    options = trainer_options({"accelerator": "cpu", "devices": devices, "precision": "32-true"})
    with pytest.raises(InputError, match=f"^{wrong}") if wrong else nullcontext():
        trainer = make_trainer(options, None, logger=False)
        assert (trainer.global_rank, trainer.world_size) == (rank, devices)


@pytest.mark.usefixtures("no_place")
def test_fit_and_doctor_refuse_a_left_over_rank(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And other commands, which have one process, do as without it."""
    for name in ("RANK", "SLURM_PROCID", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.setenv(name, "1")
    before = sorted(recipe_file.parent.iterdir())
    folders = "--run.folder", recipe_file.parent / "run", "--corpus.folder", recipe_file.parent / "corpus"
    line = refusal("fit", recipe_file, *folders)
    assert "RANK is 1, but this process would be rank 0 of 1: unset RANK SLURM_PROCID TORCHELASTIC_RESTART_" in line
    assert sorted(recipe_file.parent.iterdir()) == before
    assert f"WRONG {line.removeprefix('error: ')}\n" in run_here("doctor", recipe_file, code=1)[0]
    assert "the corpus is in" in run_here("prepare", recipe_file)[1]
