"""What only all ranks of a job together can find: who is missing, whether they reach one another, what each node sees.

Each rank writes its findings into a key-value store in rank 0, which says them once for all. Every wait is short:
a job that something is wrong with ends within a minute.
"""

import fcntl
import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist

from pipeline.config.recipe import Recipe
from pipeline.preflight.check_result import CheckResult
from pipeline.runtime.slurm import JobStep, node_name, report_mistake_to_script

WAIT = timedelta(seconds=20)
CLOCK_SECONDS = 2.0
"""Clocks that differ by more make times in logs and curves misleading."""
REDUCED_BYTES = 1 << 24
_SAMPLE = 1 << 20


class SilentError(Exception):
    """Ranks that were there do not answer any more."""

    def __init__(self, ranks: list[int]) -> None:
        names = ", ".join(map(str, ranks))
        super().__init__(f"ranks {names} have stopped answering: they hang, or their link is cut; look at their nodes")


class RankGroup:
    """This rank among the others, from the first node's name on."""

    def __init__(self, step: JobStep) -> None:
        self.step = step
        self.here = f"{node_name()} rank {step.rank}"
        self.first_on_node = step.local_rank == 0
        self.waits_for: str | None = None
        """What is wrong if this rank waits for ever, where it is not rank 0's silence."""
        self._asked = 0

    def give_up_after(self, limit: timedelta) -> None:
        """End this rank then, whatever it waits for: a collective, or rank 0 if that hangs or its link is cut."""

        def end() -> None:
            print(f"WRONG {self.waits_for or SilentError([0])} [{self.here}]", flush=True)
            report_mistake_to_script()
            os._exit(1)

        timer = threading.Timer(limit.total_seconds(), end)
        timer.daemon = True
        timer.start()

    def meet(self) -> list[CheckResult]:
        """Find the first node, and wait for all ranks; findings only where that fails."""
        from lightning.pytorch.plugins.environments import SLURMEnvironment

        os.environ["SLURM_NTASKS_PER_NODE"] = str(self.step.tasks_per_node)
        environment = SLURMEnvironment(auto_requeue=False)
        host, port = environment.main_address, environment.main_port
        try:
            address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
        except OSError as error:
            hint = "have it in DNS or /etc/hosts, or export MASTER_ADDR=its address"
            return [
                CheckResult(
                    False, f"the first node's name {host} does not resolve ({error.strerror}); {hint}", self.here
                )
            ]
        self.first_is_local = str(address).startswith("127.") or address == "::1"
        try:
            self.store = dist.TCPStore(host, port, is_master=self.step.rank == 0, timeout=WAIT, wait_for_workers=False)
            self.store.set(f"here/{self.step.rank}", self.here)
        except (RuntimeError, dist.DistError):
            if self.step.rank == 0:
                said = f"cannot listen on {host}:{port}, where ranks are to meet; export another MASTER_PORT"
            else:
                said = f"does not reach {host}:{port} of rank 0; see firewalls between nodes, or export MASTER_PORT"
            return [CheckResult(False, said, self.here)]
        missing = self.wait_for("here", list(range(self.step.num_tasks)))
        names = ", ".join(map(str, missing))
        hint = "see above why, or look at their nodes"
        return [CheckResult(False, f"ranks {names} did not come; {hint}", self.here)] if missing else []

    def wait_for(self, what: str, whom: list[int]) -> list[int]:
        """Wait until these ranks have set a key; returns those that have not."""
        deadline = time.monotonic() + WAIT.total_seconds()
        missing = whom
        while missing and time.monotonic() < deadline:
            missing = [rank for rank in missing if not self.store.check([f"{what}/{rank}"])]
            time.sleep(0.01)
        return missing

    def exchange(self, value: object) -> list:
        """Every rank's value, by rank. Raises SilentError when one does not come."""
        self._asked += 1
        key = f"value-{self._asked}"
        self.store.set(f"{key}/{self.step.rank}", json.dumps(value))
        keys = [f"{key}/{rank}" for rank in range(self.step.num_tasks)]
        try:
            self.store.wait(keys, 2 * WAIT)  # one rank may have waited in vain for a collective
        except (RuntimeError, dist.DistError):
            raise SilentError([rank for rank, one in enumerate(keys) if not self.store.check([one])]) from None
        return [json.loads(self.store.get(one)) for one in keys]


def check(ranks: RankGroup, recipe: Recipe | None) -> Iterator[CheckResult]:
    """All findings of this rank; every rank runs the same checks in the same order."""
    yield from _clock(ranks)
    yield from _same_versions(ranks)
    interfaces = list(_interfaces(ranks.first_is_local if ranks.step.num_nodes > 1 else True))
    yield from (finding._replace(where=ranks.here) for finding in interfaces)
    unreachable = any(ranks.exchange(bool(interfaces)))
    if recipe is not None:
        if ranks.step.rank == 0:
            yield from hardware_keys(ranks.step, recipe)
        yield from _corpus(ranks, Path(recipe.corpus.folder))
        yield from _run_folder(ranks, recipe.run_folder())
    if not unreachable:  # it would wait in vain, and say the same again
        yield from _all_reduce(ranks)


def gpus(step: JobStep, seen: int, promised: str | None) -> Iterator[CheckResult]:
    """A task a GPU, and a GPU a task."""
    tasks = step.tasks_per_node
    if promised and promised.isdigit() and int(promised) != seen:
        yield CheckResult(
            False, f"SLURM gave this node {promised} GPUs and torch sees {seen}; see nvidia-smi, and torch's CUDA build"
        )
    elif seen and seen != tasks:
        yield CheckResult(
            False, f"{seen} GPUs are seen by {tasks} tasks of the node; give --ntasks-per-node={seen}, or other GPUs"
        )


def hardware_keys(step: JobStep, recipe: Recipe) -> Iterator[CheckResult]:
    """Nodes and devices come from the job: what a recipe says of them is told, and does not count."""
    for key, count in (("devices", step.tasks_per_node), ("num_nodes", step.num_nodes)):
        asked = recipe.trainer.get(key, "auto")
        if asked not in ("auto", -1, "-1", count, str(count)):
            yield CheckResult(True, f"trainer.{key} {asked} of the recipe does not count: the job gives {count}")


def _clock(ranks: RankGroup) -> Iterator[CheckResult]:
    ranks.exchange(None)  # so that all look at about the same time
    clocks = ranks.exchange(time.time())
    away = clocks[ranks.step.rank] - clocks[0]
    if abs(away) > CLOCK_SECONDS:
        yield CheckResult(
            False, f"the clock is {away:+.1f} s from rank 0's; have the node's time service mended", ranks.here
        )


def _same_versions(ranks: RankGroup) -> Iterator[CheckResult]:
    ours = {name: version(name) for name in ("torch", "lightning", "numpy")}
    first = ranks.exchange(ours)[0]
    for name, number in ours.items():
        if number != first[name]:
            hint = "give all nodes one environment, on a shared disk or in one container"
            yield CheckResult(False, f"{name} {number}, and {first[name]} on rank 0; {hint}", ranks.here)


def _interfaces(first_is_local: bool) -> Iterator[CheckResult]:
    """Whether other nodes can find this one, by the interface named or by its own name."""
    there = [name for _, name in socket.if_nameindex()]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        asked = os.environ.get(variable, "")
        # NCCL's "^" and "=" before a name mean other than these, and exactly this; its names are beginnings.
        wanted = [name for name in asked.lstrip("=").split(",") if name and not asked.startswith("^")]
        if wanted and not any(one.startswith(name) for one in there for name in wanted):
            yield CheckResult(False, f"{variable}={asked}: there is no such interface; there are {', '.join(there)}")
    try:
        addresses = {entry[4][0] for entry in socket.getaddrinfo(socket.gethostname(), None)}
    except OSError:
        addresses = set()
    lost = all(str(address).startswith("127.") or address == "::1" for address in addresses)
    if lost and not first_is_local and not os.environ.get("GLOO_SOCKET_IFNAME"):
        yield CheckResult(
            False,
            f"this node's own name {socket.gethostname()} leads to itself, so gloo would wait there for the others; "
            f"export GLOO_SOCKET_IFNAME=the interface between nodes ({', '.join(there)})",
        )


def _corpus(ranks: RankGroup, folder: Path) -> Iterator[CheckResult]:
    """The same bytes from every node: all files' names and sizes, and a megabyte at begin, middle and end of each."""
    digest = None
    if ranks.first_on_node and (folder / "manifest.json").exists():
        state = hashlib.sha256()
        for path in sorted(path for path in folder.iterdir() if path.is_file()):
            size = path.stat().st_size
            state.update(f"{path.name} {size}".encode())
            with path.open("rb") as file:
                for start in (0, max(0, size // 2), max(0, size - _SAMPLE)):
                    file.seek(start)
                    state.update(file.read(_SAMPLE))
        digest = state.hexdigest()
    first = ranks.exchange(digest)[0]
    if ranks.first_on_node and digest != first:
        what = "is not there" if digest is None else "is there, but not on rank 0" if first is None else "differs"
        hint = "give one that all nodes share, or copy it anew to each node"
        yield CheckResult(False, f"corpus {folder} {what} (rank 0's is taken for the right one); {hint}", ranks.here)


def _run_folder(ranks: RankGroup, run: Path) -> Iterator[CheckResult]:
    """Each node writes there, sees what the others wrote, and heeds their locks."""
    place = next(parent for parent in [run, *run.absolute().parents] if parent.exists())
    probe = place / f".doctor-{ranks.step.job}-{ranks.step.rank}"
    lock, problem = None, None
    if ranks.first_on_node:
        try:
            lock = probe.open("w")
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            what = "cannot lock files" if lock else "is not writable"
            problem = f"run folder {run}: {place} {what} ({error.strerror}); give another run.folder"
    states = ranks.exchange([ranks.first_on_node, problem is None])
    if ranks.first_on_node and problem is None:
        others = [rank for rank, (first, well) in enumerate(states) if first and well and rank != ranks.step.rank]
        unseen = [rank for rank in others if not probe.with_name(f".doctor-{ranks.step.job}-{rank}").exists()]
        if unseen:
            names = ", ".join(map(str, unseen))
            problem = f"run folder {run}: {place} is not the one of ranks {names}; give a run.folder that nodes share"
        elif others and _can_lock(probe.with_name(f".doctor-{ranks.step.job}-{others[0]}")):
            problem = (
                f"run folder {run}: {place} does not keep one node's locks from another, so two jobs could write at "
                "once; mount it with locks (Lustre: -o flock), or give another run.folder"
            )
    ranks.exchange(None)
    if lock is not None:
        lock.close()
        probe.unlink(missing_ok=True)
    if problem is not None:
        yield CheckResult(False, problem, ranks.here)


def _can_lock(path: Path) -> bool:
    try:
        with path.open("r+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _all_reduce(ranks: RankGroup) -> Iterator[CheckResult]:
    """A real one over all ranks, on CPUs and, where there are, on GPUs."""
    on_gpu = all(ranks.exchange(torch.cuda.is_available()))
    for backend in ("gloo", "nccl") if on_gpu else ("gloo",):
        device = torch.device("cuda", ranks.step.local_rank) if backend == "nccl" else "cpu"
        hint = f"export {backend.upper()}_SOCKET_IFNAME=the interface between nodes, and see firewalls"
        ranks.waits_for = f"all-reduce over {backend} does not end; {hint}"
        # NCCL's watchdog would kill this process before it could say anything.
        timeout = 4 * WAIT if backend == "nccl" else WAIT
        try:
            store = dist.PrefixStore(backend, ranks.store)
            dist.init_process_group(
                backend, store=store, rank=ranks.step.rank, world_size=ranks.step.num_tasks, timeout=timeout
            )
            ones = torch.ones(REDUCED_BYTES // 4, device=device)
            dist.all_reduce(ones)  # the first one connects
            begin = time.monotonic()
            dist.all_reduce(ones)
            last = float(ones[-1])  # waits for a GPU
            seconds = time.monotonic() - begin
            dist.destroy_process_group()
        except (RuntimeError, dist.DistError) as error:
            yield CheckResult(
                False, f"all-reduce over {backend} failed: {str(error).splitlines()[0]}; {hint}", ranks.here
            )
            return
        finally:
            ranks.waits_for = None
        right = last == float(ranks.step.num_tasks**2)
        speed = f"all-reduce over {backend}, {ranks.step.num_tasks} ranks: {REDUCED_BYTES / seconds / 1e6:,.0f} MB/s"
        if ranks.step.rank == 0 or not right:
            yield CheckResult(right, speed + ("" if right else "; its sum is wrong; see the node's memory and network"))
