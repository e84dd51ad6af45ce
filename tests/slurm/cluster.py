"""A SLURM cluster of several nodes on one machine, in a temporary folder, without root or system services.

Each node is a slurmd with its own loopback address. Jobs are submitted with the scripts in slurm/.
"""

import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.conftest import ROOT
from tests.fork_server import ForkServer
from tests.slurm.links import Links, free_ports

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
SBIN = "/usr/sbin:/sbin"

CONF = """\
ClusterName=test
SlurmctldHost={host}({controller})
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={munge}/socket,cred_expire=20
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ReturnToService=2
JobRequeue=1
SlurmdParameters=config_overrides
MessageTimeout=30
SlurmdTimeout=60
BatchStartTimeout=200
UnkillableStepTimeout=200
KillWait=30
OverTimeLimit=0
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
AccountingStorageType=accounting_storage/none
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0,requeue_setup_env_fail
SlurmctldParameters=preempt_send_user_signal
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MinJobAge=60000
GresTypes=gpu
FirstJobId={first_job}
{nodes}
PartitionName=normal Nodes=ALL Default=YES PriorityTier=1 MaxTime=INFINITE GraceTime=60 State=UP
PartitionName=urgent Nodes=ALL PriorityTier=10 MaxTime=INFINITE PreemptMode=OFF State=UP
"""


def missing() -> list[str]:
    return [name for name in NEEDED if shutil.which(name, path=os.environ["PATH"] + ":" + SBIN) is None]


class Cluster:
    """Starts the controller and nodes, submits jobs and waits for them."""

    def __init__(self, folder: Path, num_nodes: int, links: Links | None = None) -> None:
        self.folder, self._links = folder, links
        self.nodes = links.nodes if links else [f"127.0.0.{11 + number}" for number in range(num_nodes)]
        self._munge = folder / "munge"
        for name in ("state", "munge", "logs"):
            (folder / name).mkdir(parents=True)
        self._munge.chmod(0o755)
        ports = free_ports(num_nodes + 1)
        node_lines = "\n".join(
            f"NodeName={node} NodeAddr={node} NodeHostname={socket.gethostname().split('.')[0]} Port={port} "
            "CPUs=8 RealMemory=4000 Gres=gpu:8 State=UNKNOWN"
            for node, port in zip(self.nodes, ports[1:], strict=True)
        )
        conf = folder / "slurm.conf"
        conf.write_text(
            CONF.format(
                host=socket.gethostname().split(".")[0],
                controller=links.controller if links else "127.0.0.1",
                controller_port=ports[0],
                # Ranks connect on a port derived from the job id, which must differ between clusters on one machine.
                first_job=1 + os.getpid() * 37 % 60_000,
                user=pwd.getpwuid(os.getuid()).pw_name,
                munge=self._munge,
                folder=folder,
                nodes=node_lines,
            )
        )
        # GPUs that SLURM allocates but that do not exist.
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
        for number in range(8):
            (folder / f"gpu{number}").touch()
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
            "SLURM_CONF": str(conf),
            "PATH": os.environ["PATH"] + ":" + SBIN,
            # Many ranks share a core.
            "OMP_NUM_THREADS": "1",
            "PYTHON": sys.executable,
        }
        # The fork server is in no node's network.
        self.forks = {"PYTHON": ForkServer.shared().python} if links is None else {}
        """Environment of a job whose tasks `python -m MODULE` are to be forks."""
        self._processes: dict[str, subprocess.Popen] = {}

    def start(self) -> None:
        """Start all daemons and wait until all nodes are idle."""
        key = self._munge / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        paths = [f"--{name}={self._munge / name}" for name in ("socket", "pid-file", "log-file", "seed-file")]
        self._run_forever("munged", "munged", "--foreground", "--force", f"--key-file={key}", *paths)
        self.wait_until(lambda: (self._munge / "socket").exists(), 100)
        self._run_forever("slurmctld", "slurmctld", "-D", "-f", self.environment["SLURM_CONF"])
        for node in self.nodes:
            self.start_node(node)
        self.wait_until(self.is_idle, 200)

    def start_node(self, node: str) -> None:
        inside = self._links.inside(node) if self._links else []
        self._run_forever(node, *inside, "slurmd", "-D", "-N", node, "-f", self.environment["SLURM_CONF"])

    def kill_node(self, node: str) -> None:
        """Kill a node's daemon and everything that runs on the node."""
        daemon = self._processes.pop(node)
        daemon.kill()
        daemon.wait()
        own = self._running_on(node)
        parents = set()
        for pid in own:
            with suppress(OSError):  # It has just ended.
                parents.add(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]))
        daemons = [pid for pid, arguments in processes() if pid in parents and arguments.startswith("slurmstepd")]
        # A lost node reports nothing, so none of them may see another one end. Children first: the kernel continues
        # stopped processes whose parent has ended.
        for signum in (signal.SIGSTOP, signal.SIGKILL):
            for pid in sorted((*daemons, *own), reverse=True):
                with suppress(ProcessLookupError):
                    os.kill(pid, signum)

    def _running_on(self, node: str) -> list[int]:
        """Return the process ids of what SLURM has started on a node, batch scripts among them."""
        found = []
        for pid, _ in processes():
            values = environment_of(pid)
            if values.get("SLURM_CONF") == self.environment["SLURM_CONF"] and values.get("SLURMD_NODENAME") == node:
                found.append(pid)
        return found

    def _run_forever(self, name: str, *command: str) -> None:
        with (self.folder / "logs" / name).open("a") as log:
            self._processes[name] = subprocess.Popen(
                list(command), env=self.environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def is_idle(self) -> bool:
        lines = self.run("sinfo", "-h", "-N", "-p", "normal", "-o", "%N %T", check=False).stdout.split("\n")[:-1]
        return len(lines) == len(self.nodes) and all(line.endswith(" idle") for line in lines)

    def make_idle(self) -> None:
        """Wait until all nodes are idle, whatever a test did to them.

        SLURM takes a node out of service where a daemon answers late, as on a busy machine, or a process outlives its
        job by a minute. An administrator puts it back.
        """
        deadline = time.monotonic() + 400
        while not self.is_idle():
            assert time.monotonic() < deadline, self.run("sinfo", "-N", "-o", "%N %T %E", check=False).stdout
            time.sleep(2)
            for node in self.nodes:
                if node not in self._processes or self._processes[node].poll() is not None:
                    self.start_node(node)
                self.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)

    def cancel_all(self) -> None:
        """Cancel all jobs, and those that are requeued meanwhile.

        On a busy machine, SLURM kills a cancelled job's script before it has removed its files in the project's folder.
        """
        cancelled: set[str] = set()
        while jobs := self.run("squeue", "-h", "-o", "%A", check=False).stdout.split():
            cancelled.update(jobs)
            self.run("scancel", "--user", pwd.getpwuid(os.getuid()).pw_name, check=False)
            time.sleep(0.5)
        for name in ("failures", "mistake", "first-task", "abandoned"):
            for job in cancelled:
                (ROOT / f".{name}-{job}").unlink(missing_ok=True)

    def stop(self) -> None:
        """Cancel all jobs and stop the daemons, munged last."""
        self.cancel_all()
        for pid in self.tasks():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        names = [*self.nodes, "slurmctld", "munged"]
        for name in names:
            if name in self._processes:
                self._processes[name].terminate()
                try:
                    self._processes[name].wait(10)
                except subprocess.TimeoutExpired:
                    self._processes[name].kill()
                    self._processes[name].wait()

    def run(self, *command: object, check: bool = True, **environment: str) -> subprocess.CompletedProcess:
        """Run a client command; the output is text."""
        return subprocess.run(
            [str(part) for part in command],
            env={**self.environment, **environment},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=check,
            timeout=120,
        )

    def submit(self, *arguments: object, **environment: str) -> "Job":
        """Run `sbatch ...`; the job's log is in this cluster's folder."""
        done = self.run(
            "sbatch", "--parsable", f"--output={self.folder}/logs/job-%j.log", *arguments, check=False, **environment
        )
        assert done.returncode == 0, done.stderr
        return Job(self, done.stdout.strip().split(";")[0])

    def tasks(self, job: str | None = None, node: str | None = None, rank: int | None = None) -> list[int]:
        """Return the process ids of `python -m pipeline` that this cluster has started, by their environment.

        If a fork runs the module (see tests/forked_python.py), it is the fork's.
        """
        found = []
        for pid, arguments in processes():
            if "-m pipeline" not in arguments and "-m tests." not in arguments:
                continue
            values = environment_of(pid)
            if (
                values.get("SLURM_CONF") == self.environment["SLURM_CONF"]
                and "SLURM_STEP_ID" in values
                and (job is None or values.get("SLURM_JOB_ID") == job)
                and (node is None or values.get("SLURMD_NODENAME") == node)
                and (rank is None or values.get("SLURM_PROCID") == str(rank))
            ):
                found.append(forked_by(pid))
        return sorted(found)

    @staticmethod
    def wait_until(condition: Callable[[], object], seconds: float = 1000) -> None:
        """Wait until the condition is true; raises AssertionError after the time limit."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"the condition was not met in {seconds} s"
            time.sleep(0.05)


class Job:
    def __init__(self, cluster: Cluster, number: str) -> None:
        self.cluster, self.number = cluster, number

    def all_fields(self) -> list[dict[str, str]]:
        """Return what `scontrol show job` prints of it, or of each task of an array."""
        lines = self.cluster.run("scontrol", "-o", "show", "job", self.number).stdout.splitlines()
        return [dict(pair.split("=", 1) for pair in line.split() if "=" in pair) for line in lines if line]

    def fields(self) -> dict[str, str]:
        # An array's last task has the id of the array.
        [own] = [fields for fields in self.all_fields() if fields["JobId"] == self.number]
        return own

    @property
    def state(self) -> str:
        return self.fields()["JobState"]

    def hosts(self) -> list[str]:
        """Return the nodes that it has, or had last."""
        return self.cluster.run("scontrol", "show", "hostnames", self.fields()["NodeList"]).stdout.split()

    @property
    def restarts(self) -> int:
        return int(self.fields()["Restarts"])

    @property
    def log(self) -> str:
        path = self.cluster.folder / "logs" / f"job-{self.number}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait(self) -> str:
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "DEADLINE")
        self.wait_until(lambda: self.state in over, "ended")
        return self.state

    def wait_until_restarted(self) -> None:
        self.wait_until(lambda: self.restarts == 1, "restarted")

    def wait_for(self, text: str, times: int = 1) -> None:
        """Wait until the log contains a text this many times."""
        self.wait_until(lambda: self.log.count(text) >= times, f"printed {text!r}")

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        """As the cluster does, with the job's log in the error: that it has not done this."""
        try:
            self.cluster.wait_until(condition)
        except AssertionError:
            raise AssertionError(f"job {self.number}, {self.fields()}, has not {what}:\n{self.log}") from None

    def signal(self, name: str) -> None:
        """Send a signal to all tasks, as `--signal` does before the time limit."""
        self.cluster.run("scancel", f"--signal={name}", self.number, check=False)


def processes() -> list[tuple[int, str]]:
    listed = subprocess.run(["ps", "-eo", "pid=,args=", "-ww"], capture_output=True, text=True, check=True).stdout
    return [(int(pid), arguments) for pid, arguments in (line.split(None, 1) for line in listed.splitlines())]


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment of a process; empty if it has ended."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(pair.split("=", 1) for pair in raw.split("\0") if "=" in pair)


def forked_by(pid: int) -> int:
    """Return the process that runs the module of a process of forked_python.py; else the process itself."""
    with suppress(OSError):
        if name := re.fullmatch(r"for-(\d+)\n", Path(f"/proc/{pid}/comm").read_text()):
            return int(name[1])
    return pid
