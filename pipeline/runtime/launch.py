"""How this process was launched: its rank, its SLURM job step, and the versions of its packages.

All of it is read from the environment, without torch or Lightning. The numbers of nodes and tasks come from the job
only, so that a recipe runs on any number of them.
"""

import os
import platform
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from data_module.errors import IN_CLONE, InputError

_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Step numbers from here on are SLURM's own: the batch script and the shell of salloc."""

MISTAKE_FILE = "MISTAKE_FILE"
"""Environment variable: a file that tells the job script about a user's mistake.

srun's exit code does not show it: that is the exit code of the ranks that srun killed.
"""

FAILURES_FILE = "FAILURES_FILE"
"""Environment variable: a file in which the job script counts starts without progress."""

RESTARTS_IN_JOB = "RESTARTS_IN_JOB"
"""Environment variable: how often the job script has started the step again since SLURM last started the job."""

_RANK = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
"""Environment variables: Lightning takes the first that is set for this process's rank when it is imported."""
_PLACE = (*_RANK, "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""Environment variables that say which rank of how many this process is."""

LOOPBACK = "127.0.0.1"
"""Address to which only processes of this machine can connect."""

RANKS_MISSING = 69
"""Exit code of `doctor` if ranks are missing or do not respond, name servers do not answer, or rank 0's port is in use.

The next start may succeed, so the job starts again. In sysexits.h the code means that a service is unavailable.
"""


@dataclass(frozen=True)
class JobStep:
    """The job step that this process is a task of."""

    job: str
    rank: int
    local_rank: int
    """Index among the tasks of the node."""
    num_tasks: int
    num_nodes: int
    tasks_per_node: int
    restarts: int
    """How often the job has started again: requeued by SLURM, or inside the job by its script."""
    node: int = 0
    """Index of the node among those of the step."""
    step: str = "0"
    """The step's number in the job."""

    @property
    def start(self) -> str:
        """A name that no other start has: job, step, and how often the job has started again."""
        return f"{self.job}.{self.step}.{self.restarts}"

    @property
    def location(self) -> str:
        """Name of the node, and rank, for messages."""
        return f"{node_name()} rank {self.rank}"


def current_job_step(environment: Mapping[str, str] = os.environ) -> JobStep | None:
    """Return the step that srun started this process in; None outside a job and for a single process.

    A single process was started without srun, or in the terminal of `srun --pty`.

    Raises InputError if several tasks were not started by srun, or not the same number on each node, or if a variable
    gives this process another rank than the step does, or none.
    """
    variable = rank_variable(environment)
    if variable and not environment[variable].isdigit():  # Lightning could not be imported.
        raise InputError(f"{variable} '{environment[variable]}' is no rank; unset {variable}")
    tasks = int(environment.get("SLURM_NTASKS", 1)) if _in_job(environment) else 1
    if tasks > 1 and _in_terminal(environment):
        raise InputError(
            f"the step has {tasks} tasks, and only this one runs in the terminal of srun --pty; start ranks with"
            " srun --overlap, or ask for one task"
        )
    if tasks > 1 and not _in_step(environment):
        raise InputError(f"the job has {tasks} tasks and this process was not started by srun; start it with srun")
    if not is_task(environment):
        return None
    counts = _tasks_by_node(environment)
    if len(set(counts)) > 1:
        hint = "give every node the same number with --ntasks-per-node"
        raise InputError(f"the step has {counts} tasks on its nodes; {hint}")
    step = JobStep(
        job=environment["SLURM_JOB_ID"],
        rank=int(environment["SLURM_PROCID"]),
        local_rank=int(environment["SLURM_LOCALID"]),
        num_tasks=sum(counts),
        num_nodes=len(counts),
        tasks_per_node=counts[0],
        restarts=int(environment.get("SLURM_RESTART_COUNT", 0)) + int(environment.get(RESTARTS_IN_JOB, 0)),
        node=int(environment.get("SLURM_NODEID", 0)),
        step=environment["SLURM_STEP_ID"],
    )
    # Nothing reads WORLD_SIZE in a step.
    check_place({variable: step.rank, "LOCAL_RANK": step.local_rank}, step.rank, step.num_tasks, environment)
    return step


def rank_variable(environment: Mapping[str, str] = os.environ) -> str:
    """Return the variable from which Lightning takes this process's rank; empty if none is set, or only to -1."""
    return next((name for name in _RANK if environment.get(name, "-1") != "-1"), "")


def check_place(
    place: Mapping[str, int | None], rank: int, size: int, environment: Mapping[str, str] = os.environ
) -> None:
    """Check that no variable, such as one that is left over, gives this process another place among ranks than it has.

    Such a process would train alone, and print and write nothing: only rank 0 does.

    Args:
        place: what variables have to be if they are set to another number than -1; None if they must not be set.
        rank: of this process, for the message.
        size: number of ranks, for the message.
        environment: the variables.

    Raises InputError if a variable is something else.
    """
    for name, expected in place.items():
        given = environment.get(name, "-1")
        if expected == -1 if given == "-1" else given != str(expected):
            found = " ".join(other for other in _placing(environment) if other in environment)
            raise InputError(
                f"{name} is {given}, but this process would be rank {rank} of {size}: unset {found}, or start ranks by"
                " one of trainer.devices, torchrun and srun"
            )


def forget_place(environment: MutableMapping[str, str] = os.environ) -> None:
    """Remove the variables that say which rank this process is, in a command of one process, which may start ranks."""
    for name in _placing(environment):
        environment.pop(name, None)


def _placing(environment: Mapping[str, str]) -> list[str]:
    """Return the variables that say which rank this process is, except those of its job step."""
    torchruns = [name for name in environment if name.startswith("TORCHELASTIC_")]
    return [name for name in (*_PLACE, *torchruns) if name != "SLURM_PROCID" or not is_task(environment)]


def main_address(num_nodes: int, environment: Mapping[str, str] = os.environ) -> str:
    """Return the name or address at which other ranks reach rank 0: MASTER_ADDR, else the first node of the step.

    Ranks of one node meet at the loopback address, to which other machines cannot connect.

    Raises InputError if SLURM does not name the step's nodes.
    """
    if address := environment.get("MASTER_ADDR"):
        return address
    if num_nodes == 1:
        return LOOPBACK
    if nodes := step_nodes(environment):
        return nodes[0]
    raise InputError(
        f"SLURM_STEP_NODELIST {environment.get('SLURM_STEP_NODELIST', '')}: `scontrol show hostnames` does not name the"
        " step's first node; export MASTER_ADDR=its name or address"
    )


def step_nodes(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the names of the step's nodes; none if SLURM does not name them."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    if "[" not in nodes:
        return nodes.split(",") if nodes else []
    command = ["scontrol", "show", "hostnames", nodes]  # a short form, such as rack[1-2]n[01-02]
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60, env=dict(environment))
    except (OSError, subprocess.TimeoutExpired):  # as in a container without SLURM's programs
        return []
    return done.stdout.split()


def main_ports(environment: Mapping[str, str] = os.environ) -> list[int]:
    """Return the ports for rank 0, which takes the first free one: MASTER_PORT, else 16 that follow from the job id.

    Raises InputError if MASTER_PORT is no port.
    """
    port = environment.get("MASTER_PORT", "")
    if not port:
        first = 15_000 + int(environment["SLURM_JOB_ID"][-4:])
        return list(range(first, first + 16))
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise InputError(f"MASTER_PORT '{port}' is not a port; export a number up to 65535, or unset it")
    return [int(port)]


def node_name(environment: Mapping[str, str] = os.environ) -> str:
    """Return this node's name in SLURM, or its host name."""
    return environment.get("SLURMD_NODENAME") or socket.gethostname()


def report_mistake_to_script(environment: Mapping[str, str] = os.environ) -> None:
    """Create the file that tells the job script not to requeue the job."""
    if name := environment.get(MISTAKE_FILE):
        Path(name).touch()


def clear_failure_count(environment: Mapping[str, str] = os.environ) -> None:
    """Remove the job script's count of starts: this one has made progress."""
    if name := environment.get(FAILURES_FILE):
        Path(name).unlink(missing_ok=True)


def is_task(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether srun started this process as a task of a step, not in the terminal of `srun --pty`."""
    return _in_step(environment) and not _in_terminal(environment)


def _in_job(environment: Mapping[str, str]) -> bool:
    # torchrun assigns ranks itself, inside a job as well.
    return "SLURM_JOB_ID" in environment and "TORCHELASTIC_RUN_ID" not in environment


def _in_step(environment: Mapping[str, str]) -> bool:
    step = environment.get("SLURM_STEP_ID", "")
    return _in_job(environment) and step.isdigit() and int(step) < _FIRST_SPECIAL_STEP


def _in_terminal(environment: Mapping[str, str]) -> bool:
    """Return whether this process's task runs in the terminal of `srun --pty`.

    A step that is started from there inherits the variable, but no task of it has a terminal.
    """
    if not _in_step(environment) or "SLURM_PTY_PORT" not in environment:
        return False
    for process in (environment.get("SLURM_TASK_PID", "self"), "self"):  # In a container, the task may be unknown.
        with suppress(OSError):  # Then the next process is read.
            after_name = Path("/proc", process, "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            return after_name[4] != "0"  # the number of the terminal
    return False


def _tasks_by_node(environment: Mapping[str, str]) -> list[int]:
    """Return the tasks of each node; SLURM's short form 2(x3),1 means [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", "1")).split(","):
        repeated = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if repeated is None:
            raise InputError(f"SLURM_STEP_TASKS_PER_NODE '{part}' is not understood; start the step with srun")
        counts += [int(repeated[1])] * int(repeated[2] or 1)
    return counts


def process_rank() -> int:
    """Return this process's global rank, before Lightning has set anything up."""
    # Lightning's own launcher sets LOCAL_RANK, also inside an interactive SLURM job, where SLURM_PROCID is 0 for all.
    others = () if is_task() else (("RANK",), ("LOCAL_RANK", "NODE_RANK"))
    for names in (*others, ("SLURM_PROCID",)):
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

    Under Lightning's own launcher only rank 0's counts: the launcher takes another rank's nonzero exit code for a crash
    and kills rank 0.
    """
    launched_by_lightning = "LOCAL_RANK" in os.environ and "RANK" not in os.environ and not is_task()
    return rank == 0 or not launched_by_lightning


def versions() -> dict[str, str | None]:
    """Return the revision of the code, the versions of Python and the main packages, and the host name."""
    packages = ("torch", "lightning", "sentencepiece", "sacrebleu", "numpy")
    here = Path(__file__).resolve().parent
    revision = None
    if IN_CLONE and shutil.which("git"):  # The environment of a wheel may lie within another project's clone.
        describe = ["git", "-C", str(here), "describe", "--always", "--dirty"]
        revision = subprocess.run(describe, capture_output=True, encoding="utf-8", check=False).stdout.strip() or None
    return {
        "revision": revision,
        "python": platform.python_version(),
        "host": platform.node(),
        **{name: version(name) for name in packages},
    }
