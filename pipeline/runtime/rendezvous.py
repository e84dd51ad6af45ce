"""Connects the ranks of a run through a key-value store in rank 0, and names the ranks that are missing.

PyTorch's store answers every client, and the ports at which ranks meet follow from the job's number. So rank 0 hosts
its store at a port that the system chooses, and also listens at the meeting port. A client that connects there gets the
store's port in a signed message, and nothing is read from that connection. A rank accepts only messages that are signed
with the token of its own start, and ignores another run or program that listens there.

If a rank was started with another recipe, run folder or number of ranks than rank 0, all ranks end with an error.
"""

import errno
import json
import os
import re
import secrets
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from data_module.errors import InputError, first_of
from data_module.files import PlainValues
from pipeline.runtime import signals
from pipeline.runtime.console import RendezvousError, UnusableAddressError, print_above_bars
from pipeline.runtime.launch import LOOPBACK, JobStep, local_rank, main_address, main_ports, node_name, step_nodes
from pipeline.runtime.rank_messages import (
    StrangerError,
    plain,
    post,
    read,
    set_key,
    signature,
    signed,
    silent_ranks,
    verified,
)
from pipeline.runtime.ranks_token import find_token, remove_token, write_token

NOTICE_SECONDS = 30.0
"""After this time, a rank prints which ranks it waits for."""
_ATTEMPT_SECONDS = 5.0
"""How long one attempt to connect may take."""
_GRACE_SECONDS = 5.0
"""How much longer other ranks wait for rank 0's outcome."""
_STOP_SECONDS = 15.0
"""How much longer a rank that was asked to stop waits for the others, to agree with them on stopping."""
GROUP_ERRORS = (RuntimeError, ValueError, MemoryError, dist.DistError)
"""What PyTorch raises if it cannot make a group, also of gloo's addresses that a stranger has changed in the store."""
_LINGER_SECONDS = 0.5
_POLL_SECONDS = 0.1
_POLL_STRANGERS_SECONDS = 1.0
_OUTCOME = "rendezvous/outcome"
"""Key of rank 0's outcome: the problem, or an empty one, and whether it is a user's mistake."""
_MISTAKE = "rendezvous/mistake"
"""Key of the mistake of a rank that was started otherwise than rank 0."""
_RANK_0 = "rendezvous/token and ports of rank 0"
"""Key of rank 0's token and ports in the store of torchrun's agent."""
_STORE = "rendezvous/store"
"""Name under which rank 0 signs the port of its store."""
_MESSAGE_BYTES = 256
"""Upper bound on the bytes of the message that rank 0 signs."""
_BACKLOG = 4096


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
    folder: Path | None = None
    """A folder of this start, for its token."""
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
    def _folders(self) -> list[Path]:
        # A rank that was started with another run folder finds the token in the others, and learns what differs.
        own = [self.folder] if self.folder is not None else []
        # On one machine, ranks that can write to none of them, as in a container, share the temporary folder.
        temporary = [Path(tempfile.gettempdir())] if self.host == LOOPBACK else []
        return [*own, Path(), Path(os.environ.get("HOME", ".")), *temporary]

    def connect(self) -> dist.Store:
        """Connect to rank 0's store, wait until all ranks have, and return it.

        Raises:
            InputError: a rank was started with other settings, or twice, or rank 0 cannot write its token anywhere, or
                the loopback interface does not work.
            RendezvousError: a rank is missing. The message names the rank, the address and what to do.
            UnusableAddressError: the name of rank 0's node does not exist, or this process may not use the port.
            Stopped: this process was asked to stop and another rank is missing.
        """
        self._check_host()
        settings = json.loads(json.dumps({"number of ranks": self.size, **self.settings}))
        own = plain({"node": node_name(), "process": secrets.token_hex(8), "settings": settings})
        is_mistake = False
        try:
            store = self._open() if self.rank == 0 else self._enter()
            # Rank 0 alone decides, and tells the others: if each rank decided by its own clock, some ranks would train
            # while others have given up.
            if self.rank == 0:
                post(store, _connected(0), own)
                problem, is_mistake = self._wait_for_all(store)
            else:
                self._join(store, own)
                problem, is_mistake = self._wait_for_outcome(store)
        except RuntimeError:
            problem = f"rank 0 at {self._where} has ended; see its messages, or check its node"
        finally:
            if self.listener is not None:
                self.listener.close()
                remove_token(self.start, self._folders)
        if is_mistake:
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

    def _open(self) -> dist.Store:
        """Host the store at a port that the system chooses, and listen for ranks that ask for it."""
        agent = self._agents_store() if _agent_holds_store() else None
        self.listener = self.listener or (listen(self.host, 0) if agent else self._listen())
        self.ports = [self.listener.getsockname()[1]]
        token = secrets.token_hex(32) if agent else find_token(self.start, ()) or write_token(self.start, self._folders)
        set_key(token, self.start)
        check_loopback()  # Rank 0 connects to its own store there.
        inside, timeout = listen(self.host, 0), timedelta(seconds=self.timeout_seconds)
        inside_port = inside.getsockname()[1]
        self._message = signed(_STORE, inside_port).encode()
        # `wait_for_workers` would not name missing ranks, as `_wait_for_all` does.
        store = dist.TCPStore(
            LOOPBACK, inside_port, None, True, timeout, wait_for_workers=False, master_listen_fd=inside.detach()
        )
        if agent:
            agent.set(_RANK_0, json.dumps([token, self.ports]))
        return _own_part(store)

    def _agents_store(self) -> dist.Store:
        """Connect to the store of torchrun's agent, which accepts any client and still has keys of earlier starts."""
        while True:
            try:
                return self._client(self.ports[0])
            except (OSError, RuntimeError) as error:
                run = os.environ.get("TORCHELASTIC_RUN_ID")
                self._wait_for_rank_0([f"the agent of TORCHELASTIC_RUN_ID {run}: {reason_of(error)}"])

    def _listen(self) -> socket.socket:
        """Listen on the first free port. If all of several are in use, wait: other runs use them only to meet."""
        while True:
            for port in self.ports:
                try:
                    return listen(self.host, port)
                except OSError as error:
                    failure = error
                    # A port in use may be free at the next start: its user may be a killed step or another job.
                    if error.errno != errno.EADDRINUSE:
                        break
            recurs = failure.errno != errno.EADDRINUSE
            if recurs or len(self.ports) == 1 or self._is_over:
                raise (UnusableAddressError if recurs else RendezvousError)(
                    f"cannot listen on {self._where} for other ranks ({reason_of(failure)}); export another"
                    " MASTER_PORT, or MASTER_ADDR=an address of this node"
                )
            time.sleep(_POLL_SECONDS)

    def _answer(self) -> None:
        """Send the store's port to the clients that connect within `_POLL_SECONDS`."""
        assert self.listener is not None
        end = time.monotonic() + _POLL_SECONDS
        while (left := end - time.monotonic()) > 0:
            self.listener.settimeout(left)
            with suppress(OSError):  # No client came, or it has disconnected.
                connection, _ = self.listener.accept()
                with connection:
                    connection.sendall(self._message)

    def _enter(self) -> dist.Store:
        """Ask at rank 0's ports for its store until it answers, and connect to it."""
        agent = self._agents_store() if _agent_holds_store() else None
        while True:
            token, reasons = self._find_token(agent)
            if token is not None:
                set_key(token, self.start)
                for port in self.ports:
                    try:
                        return _own_part(self._client(self._ask(port)))
                    except (OSError, RuntimeError, StrangerError) as error:
                        reasons.append(reason_of(error))
                    if self._is_over:  # A node or a stranger that is silent takes seconds for each port.
                        break
            self._wait_for_rank_0(reasons)

    def _find_token(self, agent: dist.Store | None) -> tuple[str | None, list[str]]:
        """Return the token of this start, or why there is none. From torchrun's agent, take rank 0's port as well."""
        if agent is None:
            token, places = find_token(self.start, self._folders), ", ".join(map(str, self._folders))
            return token, [] if token else [f"it has left no file .ranks-{self.start} of this user's in {places}"]
        if not agent.check([_RANK_0]):
            return None, ["it has posted no port to torchrun's agent"]
        # The port may be that of an earlier start's rank 0: it is closed, and the next attempt asks again.
        token, self.ports = json.loads(agent.get(_RANK_0))
        return token, []

    def _ask(self, port: int) -> int:
        """Return the port of rank 0's store, which rank 0 sends at its meeting port.

        Raises:
            StrangerError: another run or program listens at the meeting port.
            OSError: no process listens there, or it does not answer.
        """
        with socket.create_connection((self.host, port), timeout=_ATTEMPT_SECONDS) as connection:
            # The message usually arrives in one piece; otherwise rank 0 is asked again.
            return verified(_STORE, connection.recv(_MESSAGE_BYTES))

    def _join(self, store: dist.Store, own: PlainValues) -> None:
        """Tell rank 0 that this rank has connected; raise InputError if it was started differently or twice."""
        while not store.check([_connected(0)]):
            self._wait_for_rank_0(["it has not connected"])
        mistake, own_key = "", _connected(self.rank)
        if different := differences(own["settings"], read(store, _connected(0))["settings"]):
            mistake = (
                f"rank {self.rank} on {own['node']} was started otherwise than rank 0: {different}; start all ranks of"
                " a step by the same command"
            )
        elif store.compare_set(own_key, "", signed(own_key, own)) != signed(own_key, own).encode():
            other = read(store, own_key)["node"]
            mistake = f"two processes are rank {self.rank}, on {other} and {own['node']}; start each once"
        if mistake:
            post(store, _MISTAKE, mistake)
            raise InputError(mistake)

    def _client(self, port: int) -> dist.TCPStore:
        """Connect to a store after a test connection; without it, PyTorch would fill the log with failed attempts."""
        socket.create_connection((self.host, port), timeout=_ATTEMPT_SECONDS).close()
        timeout = timedelta(seconds=max(self.timeout_seconds - self._waited, _ATTEMPT_SECONDS))
        return dist.TCPStore(self.host, port, is_master=False, timeout=timeout, wait_for_workers=False)

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
                f"cannot connect to rank 0 at {self._where} within {self.timeout_seconds:g} s ({reason}); see its"
                f" messages{self.note}, check its node and firewalls between nodes, or export another MASTER_PORT"
            )
        if self._waited > NOTICE_SECONDS and not self._noticed and (local_rank() == 0 or self.note):
            who = f"rank {self.rank} on {node_name()}"
            print_above_bars(f"{who} waits for rank 0 at {self._where} ({reason}){self.note}")
            self._noticed = True
        # Another run's rank 0 has to answer each attempt, and each port may take a query to name servers.
        time.sleep(_POLL_STRANGERS_SECONDS if strange else _POLL_SECONDS * len(self.ports))

    def _wait_for_all(self, store: dist.Store) -> tuple[str, bool]:
        """Wait on rank 0 until all ranks have connected; post and return the problem, and whether it is a mistake.

        PyTorch's own wait would write to the log on a timeout.
        """
        keys = [_connected(rank) for rank in range(self.size)]
        problem = ""
        while not (problem or store.check([_MISTAKE]) or store.check(keys)):
            self._answer()
            is_over = self._is_over
            if not is_over and (self._noticed or self._waited < NOTICE_SECONDS):
                continue
            missing = self._missing(store)
            if missing and is_over:
                problem = (
                    f"{missing} did not connect to rank 0 at {self._where} within {self.timeout_seconds:g} s;"
                    f" see their messages{self.note}, or check their nodes and firewalls between nodes"
                )
            elif missing:
                print_above_bars(f"rank 0 waits for {missing} to connect to {self._where}{self.note}")
                self._noticed = True
        is_mistake = store.check([_MISTAKE])
        outcome = read(store, _MISTAKE) if is_mistake else problem, is_mistake
        post(store, _OUTCOME, outcome)
        if outcome[0]:
            time.sleep(_LINGER_SECONDS)  # The store ends with this process: let the others read the outcome first.
        return outcome

    def _missing(self, store: dist.Store) -> str:
        """Return the missing ranks, and the nodes from which no rank has connected; empty if all have connected."""
        missing = silent_ranks(store, [_connected(rank) for rank in range(self.size)])
        heard = {read(store, _connected(rank))["node"] for rank in range(self.size) if rank not in missing}
        silent = [node for node in self.nodes if node not in heard]
        nodes = f" (all of {first_of(silent, 16, ', ')})" if silent else ""
        return f"ranks {first_of(missing, 16, ', ')}{nodes}" if missing else ""

    def _wait_for_outcome(self, store: dist.Store) -> tuple[str, bool]:
        """Wait for the outcome that rank 0 posts in `_wait_for_all`, and return it."""
        while not store.check([_OUTCOME]):
            if self._is_over and self._waited > self.timeout_seconds + _GRACE_SECONDS:
                text = f"rank 0 did not connect to {self._where} within {self.timeout_seconds:g} s; see its messages"
                return text, False
            time.sleep(_POLL_SECONDS)
        problem, is_mistake = read(store, _OUTCOME)
        return problem, is_mistake


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


def differences(theirs: Mapping[str, object], ours: Mapping[str, object]) -> str:
    """Return the first settings of a rank that differ from those of rank 0; empty if none do."""
    keys = [key for key in {**ours, **theirs} if theirs.get(key) != ours.get(key)]
    return first_of([f"{key} {theirs.get(key)}, not {ours.get(key)}" for key in keys])


def _connected(rank: int) -> str:
    """Return the key of the message by which a rank tells that it has connected."""
    return f"rendezvous/{rank}"


def _own_part(store: dist.Store) -> dist.Store:
    """Return a view of a store under a prefix that only the ranks of this start know."""
    return dist.PrefixStore(signature("store"), store)


def _agent_holds_store() -> bool:
    """Return whether torchrun's agent hosts a store at `MASTER_PORT`, where rank 0 posts its token and port."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def reason_of(error: Exception) -> str:
    """Return the reason of a failed connection, without line numbers of Python's and PyTorch's sources."""
    if isinstance(error, OSError) and (error.errno or 0) > 0:
        return os.strerror(error.errno or 0)
    return getattr(error, "strerror", None) or re.sub(r"^\[[^]]*:\d+\] ", "", str(error).partition("\n")[0])
