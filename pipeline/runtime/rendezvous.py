"""Connects the ranks of a run through a key-value store in rank 0, and names the ranks that are missing."""

import errno
import os
import re
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from pipeline.runtime.console import RendezvousError, UnusableAddressError, print_above_bars
from pipeline.runtime.launch import JobStep, known_nodes, local_rank, main_address, main_port, node_name

if TYPE_CHECKING:
    import torch.distributed as dist

Connection = TypeVar("Connection")

NOTICE_SECONDS = 30.0
"""After this time, a rank says for whom it waits."""
_ATTEMPT_SECONDS = 5.0
"""How long one attempt to connect may take."""
_GRACE_SECONDS = 5.0
"""How much longer other ranks wait for what rank 0 has found."""
_POLL_SECONDS = 0.1
_OUTCOME = "rendezvous/outcome"
"""Key of what rank 0 has found: what is wrong, or nothing."""
_MOST_NAMED = 16


def patience_seconds(num_ranks: int) -> float:
    """Return how long ranks that start at the same time wait for the slowest of them.

    A minute for SLURM to start the tasks, and a second for each rank: to import torch and Lightning, each looks up
    65,000 files (counted in 2.13 and 2.6.6), and a shared disk may answer no more than 100,000 a second. At most ten
    minutes, the default of `run.timeout_seconds`.
    """
    return min(60.0 + num_ranks, 600.0)


@dataclass
class Rendezvous:
    """Where the ranks of a run meet, and which of them this process is."""

    host: str
    """Name or address of rank 0's node."""
    port: int
    """The port on which rank 0 listens."""
    rank: int
    size: int
    """Number of ranks."""
    timeout_seconds: float
    """How long to wait for other ranks."""
    nodes: Sequence[str] = ()
    """Names of all nodes, as far as they are known, to name those from which no rank has connected."""
    _started: float = field(default_factory=time.monotonic, init=False)
    _noticed: bool = field(default=False, init=False)

    @classmethod
    def of_job(cls, job: JobStep) -> "Rendezvous":
        """Return where the ranks of a job step meet, with the patience of its number of ranks.

        Raises InputError for an address or a port that the environment does not give.
        """
        seconds = patience_seconds(job.num_tasks)
        return cls(main_address(), main_port(), job.rank, job.num_tasks, seconds, known_nodes())

    @property
    def _where(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def _waited(self) -> float:
        return time.monotonic() - self._started

    def connect(self, serves: bool) -> "dist.Store":
        """Connect to rank 0's store, wait until all ranks have, and return it.

        Args:
            serves: whether this process hosts the store.

        Raises:
            RendezvousError: a rank is missing. It names the rank, the address and what to do.
            UnusableAddressError: the name of rank 0's node does not exist, or this process may not use the port.
        """
        import torch.distributed as dist

        self._check_host()
        store: dist.Store = self._serve() if serves else self._connect()
        if attempt := os.environ.get("TORCHELASTIC_RESTART_COUNT"):
            # The store of torchrun's agent still has the keys of the ranks that it has started before.
            store = dist.PrefixStore(f"attempt_{attempt}", store)
        try:
            store.set(_connected(self.rank), node_name())
            # Rank 0 alone decides, and tells the others: if each rank decided by its own clock, some would train while
            # others have given up.
            problem = self._wait_for_all(store) if self.rank == 0 else self._wait_for_outcome(store)
        except RuntimeError:
            problem = self._rank_0_has_ended()
        if problem:
            raise RendezvousError(problem)
        return store

    def _check_host(self) -> None:
        try:
            socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # UnicodeError: no name at all, such as one with two dots in a row
            # Other errors, such as EAI_AGAIN, come from name servers that do not answer now but may at the next start.
            no_such_name = isinstance(error, UnicodeError) or error.errno in (socket.EAI_NONAME, socket.EAI_NODATA)
            name = f"the first node's name {self.host} does not resolve ({reason_of(error)})"
            raise (UnusableAddressError if no_such_name else RendezvousError)(
                f"{name}; add it to DNS or /etc/hosts, or export MASTER_ADDR=its address"
            ) from None

    def _serve(self) -> "dist.TCPStore":
        """Host the store. A port that is in use is found before PyTorch, which would fill the log."""
        import torch.distributed as dist

        # `wait_for_workers` would name no rank that is missing; `_wait_for_all` does.
        timeout = timedelta(seconds=self.timeout_seconds)
        try:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("", self.port))
            return dist.TCPStore(self.host, self.port, is_master=True, timeout=timeout, wait_for_workers=False)
        except (OSError, RuntimeError) as error:
            # Who uses the port may have ended at the next start: a step that was killed, or another job.
            recurs = isinstance(error, OSError) and error.errno != errno.EADDRINUSE
            raise (UnusableAddressError if recurs else RendezvousError)(
                f"cannot listen on {self._where} for other ranks ({reason_of(error)}); export another MASTER_PORT, or"
                " MASTER_ADDR=an address of this node"
            ) from None

    def _rank_0_has_ended(self) -> str:
        return f"rank 0 at {self._where} has ended; see its messages, or check its node"

    def _connect(self) -> "dist.TCPStore":
        """Connect to the store of rank 0, as soon as it listens. PyTorch would fill the log with its attempts."""
        import torch.distributed as dist

        def connect() -> dist.TCPStore:
            socket.create_connection((self.host, self.port), timeout=_ATTEMPT_SECONDS).close()
            timeout = timedelta(seconds=max(self.timeout_seconds - self._waited, _ATTEMPT_SECONDS))
            return dist.TCPStore(self.host, self.port, is_master=False, timeout=timeout, wait_for_workers=False)

        return self._when_listening(connect)

    def _when_listening(self, connect: Callable[[], Connection]) -> Connection:
        """Call `connect` until rank 0 listens, and return what it returns."""
        while True:
            try:
                return connect()
            except (OSError, RuntimeError) as error:
                reason = reason_of(error)
            if self._waited > self.timeout_seconds:
                raise RendezvousError(
                    f"cannot connect to rank 0 at {self._where} within {self.timeout_seconds:g} s ({reason}); see its"
                    " messages, check its node and firewalls between nodes, or export another MASTER_PORT"
                )
            if self._waited > NOTICE_SECONDS and not self._noticed and local_rank() == 0:
                print_above_bars(f"rank {self.rank} on {node_name()} waits for rank 0 at {self._where} ({reason})")
                self._noticed = True
            time.sleep(_POLL_SECONDS)

    def _wait_for_all(self, store: "dist.Store") -> str:
        """Wait on rank 0 until all ranks have connected; return what is wrong if some have not, else an empty string.

        PyTorch's own wait would write to the log when it ends in vain.
        """

        problem = ""
        while not problem and not store.check([_connected(rank) for rank in range(self.size)]):
            time.sleep(_POLL_SECONDS)
            is_over = self._waited > self.timeout_seconds
            if not is_over and (self._noticed or self._waited < NOTICE_SECONDS):
                continue
            missing = self._missing(store)
            if missing and is_over:
                problem = (
                    f"{missing} did not connect to rank 0 at {self._where} within {self.timeout_seconds:g} s;"
                    " see their messages, or check their nodes and firewalls between nodes"
                )
            elif missing:
                print_above_bars(f"rank 0 waits for {missing} to connect to {self._where}")
                self._noticed = True
        store.set(_OUTCOME, problem)
        if problem:
            time.sleep(5 * _POLL_SECONDS)  # The store ends with this process; first the others read this.
        return problem

    def _missing(self, store: "dist.Store") -> str:
        """Return the ranks that have not connected, and the nodes from which none has; empty if all have."""
        missing = [rank for rank in range(self.size) if not store.check([_connected(rank)])]
        heard = {store.get(_connected(rank)).decode() for rank in range(self.size) if rank not in missing}
        silent = [node for node in self.nodes if node not in heard]
        return f"ranks {few(missing)}" + (f" (all of {few(silent)})" if silent else "") if missing else ""

    def _wait_for_outcome(self, store: "dist.Store") -> str:
        """Wait until rank 0 has told what `_wait_for_all` returned, and return it."""
        while not store.check([_OUTCOME]):
            if self._waited > self.timeout_seconds + _GRACE_SECONDS:
                return f"rank 0 did not connect to {self._where} within {self.timeout_seconds:g} s; see its messages"
            time.sleep(_POLL_SECONDS)
        return store.get(_OUTCOME).decode()


def _connected(rank: int) -> str:
    """Return the key of the node of a rank that has connected."""
    return f"rendezvous/{rank}"


def reason_of(error: Exception) -> str:
    """Return the reason of a failed connection, without places in Python's and PyTorch's sources."""
    if isinstance(error, OSError) and (error.errno or 0) > 0:
        return os.strerror(error.errno or 0)
    return getattr(error, "strerror", None) or re.sub(r"^\[enforce .*?\] ", "", str(error).partition("\n")[0])


def few(names: Sequence[object]) -> str:
    """Return the first names, and the number of the others."""
    more = [f"{len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else []
    return ", ".join([*map(str, names[:_MOST_NAMED]), *more])
