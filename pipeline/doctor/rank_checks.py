"""Checks that need all ranks of a job step: missing ranks, network, shared folders, locks.

The ranks exchange values through the key-value store to which `rendezvous.py` connects them. Every wait has a limit
that grows with the number of ranks: `patience_seconds`.
"""

import hashlib
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from data_module.corpus.manifest import MANIFEST_NAME, is_corpus, read_manifest
from data_module.errors import InputError
from data_module.system.files import FileLock, existing_parent, read_whole
from pipeline.config.recipe import Recipe
from pipeline.doctor.recipe_checks import CheckResult
from pipeline.ranks.rank_messages import post, read, silent_ranks
from pipeline.ranks.rendezvous import Rendezvous, patience_seconds, use_loopback
from pipeline.runtime.console import RendezvousError
from pipeline.runtime.devices import sees_own_gpu_only
from pipeline.runtime.launch import RANKS_MISSING, JobStep, node_name, report_mistake_to_script

ALL_REDUCE_BYTES = 1 << 24


class UnresponsiveRanksError(RendezvousError):
    """Ranks that had connected no longer respond."""

    def __init__(self, ranks: list[int]) -> None:
        names = ", ".join(map(str, ranks))
        super().__init__(f"ranks {names} do not respond: they hang or are disconnected; check their nodes")


@contextmanager
def _rank_0_answers() -> Iterator[None]:
    """Raise UnresponsiveRanksError if the store no longer answers, since it ends with rank 0."""
    try:
        yield
    except (RuntimeError, dist.DistError):
        raise UnresponsiveRanksError([0]) from None


class RankGroup:
    """This rank and its connection to the others."""

    def __init__(self, job: JobStep) -> None:
        self.job = job
        self.location = job.location
        self.is_first_on_node = job.local_rank == 0
        self.pending: str | None = None
        """The message to print if this rank hangs now; None if a hang would mean that rank 0 does not respond."""
        self._num_gathered = 0

    @property
    def wait(self) -> timedelta:
        """How long one wait for other ranks may take."""
        return timedelta(seconds=patience_seconds(self.job.num_tasks))

    def exit_after(self, limit: timedelta) -> None:
        """Exit with an error after this time, even if this rank waits for a collective or a lost rank 0."""

        def end() -> None:
            print(f"WRONG {self.pending or UnresponsiveRanksError([0])} [{self.location}]", flush=True)
            if self.pending:
                report_mistake_to_script()
            os._exit(1 if self.pending else RANKS_MISSING)

        self._timer = threading.Timer(limit.total_seconds(), end)
        self._timer.daemon = True
        self._timer.start()

    def connect(self, meeting: Rendezvous) -> None:
        """Connect to rank 0 and wait for all ranks.

        Raises what `Rendezvous.connect` does.
        """
        self.store = meeting.connect()
        if self.job.num_nodes == 1:
            use_loopback()
        address = socket.getaddrinfo(meeting.host, meeting.ports[0], type=socket.SOCK_STREAM)[0][4][0]
        self.first_node_is_local = ipaddress.ip_address(str(address)).is_loopback
        self.exit_after(3 * self.wait)

    @_rank_0_answers()
    def all_gather(self, value: object) -> list:
        """Return the values of all ranks, by rank; a value is anything that JSON can hold.

        Raises UnresponsiveRanksError if a rank has set no value in time.
        """
        self._num_gathered += 1
        post(self.store, f"value-{self._num_gathered}/{self.job.rank}", value)
        keys = [f"value-{self._num_gathered}/{rank}" for rank in range(self.job.num_tasks)]
        # Wait twice as long: another rank may first wait for a collective that fails.
        if missing := self._wait_for(keys, 2 * self.wait):
            raise UnresponsiveRanksError(missing)
        return [read(self.store, key) for key in keys]

    @_rank_0_answers()
    def leave(self) -> None:
        """Wait until rank 0 leaves, after it has printed the results; rank 0 then waits for all others.

        srun kills all ranks when one exits with an error, and rank 0 hosts the store: it must be ready first and end
        last.

        Raises UnresponsiveRanksError if rank 0 has ended.
        """
        keys = [f"leaves/{rank}" for rank in range(self.job.num_tasks)]
        if self.job.rank > 0:
            self._wait_for(keys[:1], self.wait)
        self.store.set(keys[self.job.rank], "")
        if self.job.rank == 0:
            self._wait_for(keys, self.wait)
        self._timer.cancel()

    def _wait_for(self, keys: list[str], limit: timedelta) -> list[int]:
        """Wait until these keys of the store, by rank, are set; return the ranks whose key is not set in time."""
        try:
            self.store.wait(keys, limit)
        except (RuntimeError, dist.DistError):
            return silent_ranks(self.store, keys)
        return []


def check_ranks(ranks: RankGroup, recipe: Recipe | None) -> Iterator[CheckResult]:
    """Run all checks of this module. Every rank must run them, in the same order."""
    interfaces = list(_check_interfaces(ranks.first_node_is_local if ranks.job.num_nodes > 1 else True))
    yield from (result._replace(where=ranks.location) for result in interfaces)
    unreachable = any(ranks.all_gather(bool(interfaces)))
    if recipe is not None:
        yield from _check_shared_corpus(ranks, recipe.corpus_folder())
        yield from _check_shared_run_folder(ranks, recipe.run_folder())
    shared = list(_check_own_gpus(ranks))
    yield from shared
    if not unreachable and not shared:  # Otherwise it would fail for the reason that is already reported.
        yield from _check_all_reduce(ranks)


def _check_interfaces(first_node_is_local: bool) -> Iterator[CheckResult]:
    """Check that other nodes can reach this one, by the selected interface or by the node's own name."""
    existing = [name for _, name in socket.if_nameindex()]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = os.environ.get(variable, "")
        # For NCCL, names are prefixes; "^" excludes the names after it, "=" matches them exactly.
        wanted = [name for name in value.lstrip("=").split(",") if name and not value.startswith("^")]
        if wanted and not any(interface.startswith(name) for interface in existing for name in wanted):
            yield CheckResult(False, f"{variable}={value}: no such interface; set it to one of {', '.join(existing)}")
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None)}
    except OSError:
        addresses = set()
    unreachable = all(ipaddress.ip_address(address).is_loopback for address in addresses)
    if unreachable and not first_node_is_local and not os.environ.get("GLOO_SOCKET_IFNAME"):
        yield CheckResult(
            False,
            f"this node's name {socket.gethostname()} resolves to the node itself, so gloo on other nodes cannot reach "
            f"it; export GLOO_SOCKET_IFNAME=the interface between nodes ({', '.join(existing)})",
        )


def _check_shared_corpus(ranks: RankGroup, folder: Path) -> Iterator[CheckResult]:
    """Check that all nodes see the same corpus."""
    digest = _corpus_digest(folder) if ranks.is_first_on_node else None
    first = ranks.all_gather(digest)[0]
    if ranks.is_first_on_node and digest != first:
        problem = "is missing here but exists on rank 0" if digest is None else "differs from rank 0's"
        if first is None:
            problem = "exists here but is missing on rank 0"
        hint = "use a folder that all nodes share, or copy the corpus to each node again"
        yield CheckResult(False, f"corpus {folder} {problem}; {hint}", ranks.location)


def _corpus_digest(folder: Path) -> str | None:
    """Return the hash of the manifest, or what is wrong with the files that it lists; None without a corpus."""
    if not is_corpus(folder):
        return None
    try:
        read_manifest(folder)
    except InputError as error:
        return str(error)
    return hashlib.sha256(read_whole(folder / MANIFEST_NAME)).hexdigest()


def _check_shared_run_folder(ranks: RankGroup, run: Path) -> Iterator[CheckResult]:
    """Check that each node can write to the run folder and sees the files and locks of the others."""
    folder = existing_parent(run)
    probe = folder / f".doctor-{ranks.job.job}-{ranks.job.rank}"
    lock, problem = None, None
    if ranks.is_first_on_node:
        try:
            lock = FileLock(probe)
            lock.take()
        except OSError as error:
            reason = "cannot lock files" if lock else "is not writable"
            problem = f"run folder {run}: {folder} {reason} ({error.strerror}); set another run.folder"
    states = ranks.all_gather([ranks.is_first_on_node, problem is None])
    if ranks.is_first_on_node and problem is None:
        others = [rank for rank, (first, ok) in enumerate(states) if first and ok and rank != ranks.job.rank]
        unseen = [rank for rank in others if not probe.with_name(f".doctor-{ranks.job.job}-{rank}").exists()]
        if unseen:
            names = ", ".join(map(str, unseen))
            problem = f"run folder {run}: {folder} is not shared with ranks {names}; set run.folder to a shared folder"
        elif others and _can_lock(probe.with_name(f".doctor-{ranks.job.job}-{others[0]}")):
            problem = (
                f"run folder {run}: {folder} does not show one node's locks to another, so two jobs could write at the "
                "same time; mount it with locks (Lustre: -o flock), or set another run.folder"
            )
    ranks.all_gather(None)  # a barrier: all ranks have looked
    if lock is not None:
        lock.close()
        probe.unlink(missing_ok=True)
    if problem is not None:
        yield CheckResult(False, problem, ranks.location)


def _can_lock(path: Path) -> bool:
    try:
        with FileLock(path) as lock:
            return lock.take()
    except OSError:
        return False


def _check_own_gpus(ranks: RankGroup) -> Iterator[CheckResult]:
    """Check that no two ranks of a node use the same GPU. All ranks yield the same results."""
    index = own_gpu(ranks.job)
    own = None if index is None else str(torch.cuda.get_device_properties(index).uuid)
    users: dict[tuple[str, str], list[int]] = {}
    for rank, (node, gpu) in enumerate(ranks.all_gather([node_name(), own])):
        if gpu is not None:
            users.setdefault((node, gpu), []).append(rank)
    for (node, _), theirs in users.items():
        if len(theirs) > 1:
            hint = "give each task its own by --gpus-per-node and --ntasks-per-node, without --gpu-bind"
            yield CheckResult(False, f"ranks {', '.join(map(str, theirs))} on {node} have the same GPU; {hint}")


def own_gpu(job: JobStep) -> int | None:
    """Return the index of this rank's GPU among those that torch sees; None if there is no such GPU."""
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = 0 if sees_own_gpu_only(job, visible) else job.local_rank
    return index if index < visible else None


def _check_all_reduce(ranks: RankGroup) -> Iterator[CheckResult]:
    """Run an all-reduce over all ranks, on CPUs and, if every rank has one, on GPUs."""
    num_ranks = ranks.job.num_tasks
    on_gpu = all(ranks.all_gather(own_gpu(ranks.job) is not None))
    for backend in ("gloo", "nccl") if on_gpu else ("gloo",):
        hint = f"export {backend.upper()}_SOCKET_IFNAME=the interface between nodes, and check firewalls"
        ranks.pending = f"all-reduce over {backend} does not finish; {hint}"
        try:
            value, seconds = _time_all_reduce(ranks, backend)
        except (RuntimeError, dist.DistError) as error:
            message = f"all-reduce over {backend} failed: {str(error).splitlines()[0]}; {hint}"
            yield CheckResult(False, message, ranks.location)
            return
        finally:
            ranks.pending = None
        speed = f"all-reduce over {backend}, {num_ranks} ranks: {ALL_REDUCE_BYTES / seconds / 1e6:,.0f} MB/s"
        if value != num_ranks**2:
            yield CheckResult(False, f"{speed}; the sum is wrong; check the node's memory and network")
        elif ranks.job.rank == 0:
            yield CheckResult(True, speed)


def _time_all_reduce(ranks: RankGroup, backend: str) -> tuple[float, float]:
    """Sum ones twice over all ranks; return a value of the result and the seconds of the second all-reduce."""
    device = torch.device("cuda", own_gpu(ranks.job) or 0) if backend == "nccl" else "cpu"
    # NCCL's watchdog kills the process at the timeout; `exit_after` comes first and prints why.
    timeout = 4 * ranks.wait if backend == "nccl" else ranks.wait
    store = dist.PrefixStore(backend, ranks.store)
    rank, size = ranks.job.rank, ranks.job.num_tasks
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    ones = torch.ones(ALL_REDUCE_BYTES // 4, device=device)
    dist.all_reduce(ones)  # the first one connects the ranks
    start = time.monotonic()
    dist.all_reduce(ones)
    value = float(ones[-1])  # waits for the GPU
    seconds = time.monotonic() - start
    dist.destroy_process_group()
    return value, seconds
