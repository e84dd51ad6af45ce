"""Connects the ranks of a run through a key-value store, and names the ranks that are missing.

PyTorch's store answers every client, and the ports at which ranks meet follow from the job's number. So rank 0 hosts
its store at a port that the system chooses, and also listens at the meeting port. A client that connects there gets the
store's port in a message signed for this start (`rank_messages.py`), and nothing is read from it. So a rank ignores
another run or program that listens there. Under torchrun, the store is that of its agent.
"""

import errno
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from data_module.errors import InputError, first_of
from data_module.system.files import PlainValues
from pipeline.ranks.rank_messages import (
    RANKS_TOKEN,
    StrangerError,
    plain,
    read,
    set_key,
    signature,
    signed,
    silent_ranks,
    verified,
)
from pipeline.runtime import signals
from pipeline.runtime.console import RendezvousError, UnusableAddressError, report
from pipeline.runtime.launch import LOOPBACK, JobStep, local_rank, main_address, main_ports, node_name, step_nodes

NOTICE_SECONDS = 30.0
"""After this time, a rank prints which ranks it waits for."""
GROUP_ERRORS = (RuntimeError, ValueError, MemoryError, dist.DistError)
"""What PyTorch raises if it cannot make a group, also of gloo's addresses that a stranger has changed in the store."""
_ATTEMPT_SECONDS = 5.0  # for one attempt to connect
_GRACE_SECONDS = 5.0  # other ranks wait so much longer for rank 0's outcome
_STOP_SECONDS = 15.0  # a rank that was asked to stop waits so much longer, to agree with the others on stopping
_LINGER_SECONDS = 0.5  # rank 0 stays so long after an outcome, for the others to read it
_POLL_SECONDS, _POLL_STRANGERS_SECONDS = 0.1, 1.0
_OUTCOME = "rendezvous/outcome"  # the problem, or an empty one, and whether it is a user's mistake
_STORE = "rendezvous/store"  # the name under which rank 0 signs the port of its store
_MESSAGE_BYTES = 256  # of that message, at most
_BACKLOG = 4096


def patience_seconds(num_ranks: int) -> float:
    """Return how long ranks that start at the same time wait for the slowest of them."""
    # A minute for SLURM to start the tasks, and a second for each rank: to import torch and Lightning, each looks up
    # 65,000 files, and a shared disk may answer 100,000 a second. At most the default of `run.timeout_seconds`.
    return min(60.0 + num_ranks, 600.0)


@dataclass
class Rendezvous:
    """Where the ranks of a run meet, and which of them this process is."""

    host: str
    """Name or address of rank 0's node."""
    ports: Sequence[int]
    """Rank 0 listens on the first of these ports that is free."""
    rank: int
    size: int
    """Number of ranks."""
    timeout_seconds: float
    """How long to wait for other ranks."""
    nodes: Sequence[str] = ()
    """Names of all nodes, as far as they are known, to name those from which no rank has connected."""
    start: str = ""
    """A name that no other start has, such as `JobStep.start`."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Settings that must be the same on all ranks."""
    listener: socket.socket | None = None
    """On rank 0, the socket that already listens on the port, if there is one."""
    note: str = ""
    """What to add where others are missing. With it, not only a node's first rank says early that rank 0 is."""
    _started: float = field(default_factory=time.monotonic, init=False)
    _noticed: bool = field(default=False, init=False)
    _message: bytes = field(default=b"", init=False)

    @classmethod
    def of_job(cls, job: JobStep) -> "Rendezvous":
        """Return the rendezvous of a job step's ranks, with a timeout that grows with their number.

        Raises InputError if the environment gives no valid address or port.
        """
        where = main_address(job.num_nodes), main_ports()
        return cls(*where, job.rank, job.num_tasks, patience_seconds(job.num_tasks), step_nodes(), job.start)

    @property
    def _where(self) -> str:
        last = f"-{self.ports[-1]}" if len(self.ports) > 1 else ""
        return f"{self.host}:{self.ports[0]}{last}"

    @property
    def _waited(self) -> float:
        return time.monotonic() - self._started

    @property
    def _at_agent(self) -> bool:  # torchrun's agent has the store, at the port itself
        return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    @property
    def _main(self) -> str:
        return f"{'the agent of torchrun' if self._at_agent else 'rank 0'} at {self._where}"

    def connect(self) -> dist.Store:
        """Connect to rank 0's store, wait until all ranks have, and return it.

        Raises:
            InputError: a rank was started with other settings, or twice, and the ranks have a token; or the loopback
                interface does not work.
            RendezvousError: a rank is missing. The message names the rank, the address and what to do. Without a
                token, also if a rank was started with other settings, or twice.
            UnusableAddressError: the name of rank 0's node does not exist, or this process may not use the port.
            Stopped: this process was asked to stop and another rank is missing.
        """
        self._check_host()
        set_key(self.start)
        settings = json.loads(json.dumps({"number of ranks": self.size, **self.settings}))
        own = plain({"node": node_name(), "process": secrets.token_hex(8), "settings": settings})
        is_mistake = False
        try:
            is_host = self.rank == 0 and not self._at_agent
            store = dist.PrefixStore(signature("store"), self._host() if is_host else self._find())
            problem = self._join(store, own)
            problem, is_mistake = (problem, True) if problem else self._outcome(store)
        except RuntimeError:
            problem = f"{self._main} has ended; see its messages, or check its node"
        finally:
            if self.listener is not None:
                self.listener.close()
        if is_mistake and os.environ.get(RANKS_TOKEN):  # Otherwise anybody can have posted it: it is not final.
            raise InputError(problem)
        if problem:
            signals.raise_if_stopped("while ranks connected")
            raise RendezvousError(problem)
        return store

    def _check_host(self) -> None:
        try:
            socket.getaddrinfo(self.host, self.ports[0], type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # UnicodeError: an invalid name, such as one with two dots in a row
            # Other errors, such as EAI_AGAIN, come from name servers that do not answer now but may at the next start.
            no_such_name = isinstance(error, UnicodeError) or error.errno in (socket.EAI_NONAME, socket.EAI_NODATA)
            name = f"the first node's name {self.host} does not resolve ({reason_of(error)})"
            raise (UnusableAddressError if no_such_name else RendezvousError)(
                f"{name}; add it to DNS or /etc/hosts, or export MASTER_ADDR=its address"
            ) from None

    def _host(self) -> dist.TCPStore:
        """Host the store at a port that the system chooses, and listen for ranks that ask for it."""
        self.listener = self.listener or self._listen()
        self.ports = [self.listener.getsockname()[1]]
        check_loopback()  # Rank 0 connects to its own store there.
        inside, timeout = listen(self.host, 0), timedelta(seconds=self.timeout_seconds)
        inside_port = inside.getsockname()[1]
        self._message = signed(_STORE, inside_port).encode()
        # `wait_for_workers` would not name missing ranks, and would write to the log.
        return dist.TCPStore(
            LOOPBACK, inside_port, None, True, timeout, wait_for_workers=False, master_listen_fd=inside.detach()
        )

    def _listen(self) -> socket.socket:
        for port in self.ports:
            try:
                return listen(self.host, port)
            except OSError as error:
                failure = error
        # A port in use may be free at the next start: its user may be a killed step or another job.
        raise (RendezvousError if failure.errno == errno.EADDRINUSE else UnusableAddressError)(
            f"cannot listen on {self._where} for other ranks ({reason_of(failure)}); export another MASTER_PORT, or"
            " MASTER_ADDR=an address of this node"
        )

    def _answer(self, listener: socket.socket) -> None:
        """Send the store's port to the clients that connect within `_POLL_SECONDS`."""
        end = time.monotonic() + _POLL_SECONDS
        while (left := end - time.monotonic()) > 0:
            listener.settimeout(left)
            with suppress(OSError):  # No client came, or it has disconnected.
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(self._message)

    def _find(self) -> dist.TCPStore:
        """Ask at rank 0's ports for its store until it answers, and connect to it."""
        while True:
            reasons = []
            for port in self.ports:
                try:
                    return self._client(port)
                except (OSError, RuntimeError, StrangerError) as error:
                    reasons.append(reason_of(error))
                if self._is_over:  # A node or a stranger that is silent takes seconds for each port.
                    break
            self._wait_for_rank_0(reasons)

    def _client(self, port: int) -> dist.TCPStore:
        """Ask for the store's port and connect to it.

        Raises:
            StrangerError: another run or program listens.
            OSError, RuntimeError: no process listens, or it does not answer.
        """
        if not self._at_agent:
            with socket.create_connection((self.host, port), timeout=_ATTEMPT_SECONDS) as connection:
                # The message usually arrives in one piece; otherwise rank 0 is asked again.
                port = verified(_STORE, connection.recv(_MESSAGE_BYTES))
        # Without this test, PyTorch would fill the log with failed attempts.
        socket.create_connection((self.host, port), timeout=_ATTEMPT_SECONDS).close()
        timeout = timedelta(seconds=max(self.timeout_seconds - self._waited, _ATTEMPT_SECONDS))
        return dist.TCPStore(self.host, port, is_master=False, timeout=timeout, wait_for_workers=False)

    def _join(self, store: dist.Store, own: PlainValues) -> str:
        """Tell that this rank has connected; post and return the mistake if it was started differently or twice."""
        mistake, own_key = "", _connected(self.rank)
        while self.rank and not store.check([_connected(0)]):
            self._wait_for_rank_0(["it has not connected"])
        first = read(store, _connected(0)) if self.rank else own
        if different := other_settings(own["settings"], first["settings"]):
            mistake = (
                f"rank {self.rank} on {own['node']} was started otherwise than rank 0: {different}; start all ranks of"
                " a step by the same command, in the same environment"
            )
        elif store.compare_set(own_key, "", signed(own_key, own)) != signed(own_key, own).encode():
            # Agents of torchrun count restarts each for itself: a rank may have the name of a start that is over.
            other = read(store, own_key)["node"]
            mistake = f"two processes are rank {self.rank}, on {other} and {own['node']}; start each once"
        if mistake:
            _end(store, mistake, True)
        return mistake

    @property
    def _is_over(self) -> bool:
        if signals.first_signal() is not None:
            self.timeout_seconds = min(self.timeout_seconds, self._waited + _STOP_SECONDS)
        return self._waited > self.timeout_seconds

    def _wait_for_rank_0(self, reasons: Sequence[str]) -> None:
        """Wait before the next attempt to connect; raise RendezvousError if the time is over."""
        strange = StrangerError.strerror in reasons
        reason = StrangerError.strerror if strange else reasons[0]
        if self._is_over:
            signals.raise_if_stopped("while ranks connected")
            raise RendezvousError(
                f"cannot connect to {self._main} within {self.timeout_seconds:g} s ({reason}); see its"
                f" messages{self.note}, check its node and firewalls between nodes, or export another MASTER_PORT"
            )
        if self._waited > NOTICE_SECONDS and not self._noticed and (local_rank() == 0 or self.note):
            who = f"rank {self.rank} on {node_name()}"
            report(f"{who} waits for {self._main} ({reason}){self.note}")
            self._noticed = True
        # Another run's rank 0 has to answer each attempt, and each port may take a query to name servers.
        time.sleep(_POLL_STRANGERS_SECONDS if strange else _POLL_SECONDS * len(self.ports))

    def _outcome(self, store: dist.Store) -> tuple[str, bool]:
        """Wait until a rank has posted an outcome: the problem, if there is one, and whether it is a user's mistake.

        Rank 0 alone decides that ranks are missing: if each rank decided by its own clock, some would train while
        others have given up.
        """
        while not store.check([_OUTCOME]):
            if self.listener is None:
                time.sleep(_POLL_SECONDS)
            else:
                self._answer(self.listener)
            if self.rank == 0:
                self._look_for_all(store)
            elif self._is_over and self._waited > self.timeout_seconds + _GRACE_SECONDS:
                text = f"rank 0 did not connect to {self._where} within {self.timeout_seconds:g} s; see its messages"
                return text, False
        problem, is_mistake = read(store, _OUTCOME)
        if problem and self.rank == 0:
            time.sleep(_LINGER_SECONDS)  # The store ends with this process.
        return problem, is_mistake

    def _look_for_all(self, store: dist.Store) -> None:
        """Post the outcome when all ranks have connected or it is too late; say once who is missing."""
        keys = [_connected(rank) for rank in range(self.size)]
        if store.check(keys):
            _end(store, "", False)
        elif self._is_over or (self._waited > NOTICE_SECONDS and not self._noticed):
            missing = silent_ranks(store, keys)
            heard = {read(store, key)["node"] for rank, key in enumerate(keys) if rank not in missing}
            silent = [node for node in self.nodes if node not in heard]
            nodes = f" (all of {first_of(silent, 16, ', ')})" if silent else ""
            who = f"ranks {first_of(missing, 16, ', ')}{nodes}"
            if missing and self._is_over:
                problem = f"{who} did not connect to rank 0 at {self._where} within {self.timeout_seconds:g} s"
                advice = f"see their messages{self.note}, or check their nodes and firewalls between nodes"
                _end(store, f"{problem}; {advice}", False)
            elif missing:
                report(f"rank 0 waits for {who} to connect to {self._where}{self.note}")
                self._noticed = True


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on a port, 0 for any; only for this machine if `host` is the loopback address."""
    if host == LOOPBACK:
        return socket.create_server((LOOPBACK, port), backlog=_BACKLOG)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=_BACKLOG, dualstack_ipv6=both)


def check_loopback() -> None:
    """Raise InputError if processes of this machine cannot connect to one another.

    PyTorch would try for a long time, and print the calls of its C++ code.
    """
    try:
        with listen(LOOPBACK, 0) as server:
            socket.create_connection(server.getsockname(), timeout=_ATTEMPT_SECONDS).close()
    except OSError as error:
        raise InputError(
            f"processes of this machine cannot connect to one another at {LOOPBACK} ({reason_of(error)}); bring its"
            " loopback interface up (ip link set lo up), or set trainer.devices to 1"
        ) from None


def use_loopback() -> None:
    """Let gloo and NCCL connect ranks of one machine by its loopback interface, unless the user has set another."""
    for name in {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}:
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, name)


def not_connected(backend: str, where: str, error: Exception) -> RendezvousError:
    """Return the error of ranks that have met, if a backend of `torch.distributed` then fails to connect them."""
    return RendezvousError(
        f"all ranks have met{where}, but {backend} does not connect them ({reason_of(error)}); export"
        f" {backend.upper()}_SOCKET_IFNAME=the interface between nodes, and check firewalls"
    )


def other_settings(theirs: Mapping[str, object], ours: Mapping[str, object]) -> str:
    """Return the first settings of a rank that differ from those of rank 0; empty if none do."""
    keys = [key for key in {**ours, **theirs} if theirs.get(key) != ours.get(key)]
    return first_of([f"{key} {theirs.get(key)}, not {ours.get(key)}" for key in keys])


def _connected(rank: int) -> str:
    """Return the key of the message by which a rank tells that it has connected."""
    return f"rendezvous/{rank}"


def _end(store: dist.Store, problem: str, is_mistake: bool) -> None:
    """Post the outcome, unless another rank has done so first."""
    store.compare_set(_OUTCOME, "", signed(_OUTCOME, [problem, is_mistake]))


def reason_of(error: Exception) -> str:
    """Return the reason of a failed connection, without line numbers of Python's and PyTorch's sources."""
    if isinstance(error, OSError) and (error.errno or 0) > 0:
        return os.strerror(error.errno or 0)
    return getattr(error, "strerror", None) or re.sub(r"^\[[^]]*:\d+\] ", "", str(error).partition("\n")[0])
