"""Ranks that connect to one another, whoever else connects or listens, and what is said of those that do not."""

import ctypes
import errno
import itertools
import json
import math
import multiprocessing
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import LightningEnvironment

from data_module.errors import InputError
from pipeline.ranks import rendezvous
from pipeline.ranks.rank_messages import RANKS_TOKEN, StrangerError, post, read, set_key, signature, signed, verified
from pipeline.ranks.rendezvous import _STORE, Rendezvous, patience_seconds
from pipeline.runtime import signals
from pipeline.runtime.console import RendezvousError
from pipeline.runtime.launch import RANKS_MISSING
from pipeline.training.trainer import ConnectedDDP
from tests.conftest import refusal, run_here

HOST, TOKEN = "127.0.0.1", "a" * 64
FORK = multiprocessing.get_context("fork")
PATIENCE_SECONDS = 120


def free_ports(count: int) -> list[int]:
    """Return ports in a row on which nobody listens now."""
    while True:
        with socket.create_server((HOST, 0)) as server:
            first = int(server.getsockname()[1])
        try:
            for port in range(first, first + count):
                socket.create_server((HOST, port)).close()
        except OSError:
            continue
        return list(range(first, first + count))


@pytest.fixture
def port() -> int:
    return free_ports(1)[0]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RANKS_TOKEN, TOKEN)
    monkeypatch.setattr(rendezvous, "NOTICE_SECONDS", 1.0)
    monkeypatch.setattr(rendezvous, "_ATTEMPT_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(rendezvous, "node_name", lambda: "here")


def meet(
    ports: list[int],
    size: int,
    ranks: list[int],
    timeout_seconds: float = PATIENCE_SECONDS,
    listener: socket.socket | None = None,
    start: str = "7.0.0",
) -> list[Any]:
    """Let some ranks of a start meet, each in a thread; return their stores, or in place of one why it has none."""
    found: list[Any] = [None] * len(ranks)

    def connect(index: int) -> None:
        rank = ranks[index]
        meeting = Rendezvous(HOST, ports, rank, size, timeout_seconds, ["here", "there"], start)
        meeting.listener = None if rank else listener
        try:
            found[index] = meeting.connect()
        except (InputError, RendezvousError) as error:
            found[index] = str(error)

    threads = [threading.Thread(target=connect, args=(index,), daemon=True) for index in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def all_have_met(found: list[Any]) -> bool:
    return all(isinstance(one, dist.Store) for one in found)


def test_ranks_that_torchrun_has_started_again_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent's store has the keys of the start before, whose name is that of ranks that have restarted less often.

    These end, to be restarted, and do not take the dead ranks of that start for the others.
    """
    agent = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for start in ("0", "1"):
        assert all_have_met(meet([agent.port], 3, [2, 1, 0], start=start))
    for rank in (0, 1):
        [found] = meet([agent.port], 3, [rank], start="0")
        assert found == f"two processes are rank {rank}, on here and here; start each once"
    del agent


def test_the_start_of_ranks_that_torchrun_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """It differs from run to run and from restart to restart, and for two agents on one network."""
    starts = []
    monkeypatch.setattr(Rendezvous, "connect", lambda meeting: starts.append(meeting.start) or dist.HashStore())
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    for environment in ({}, {"TORCHELASTIC_RESTART_COUNT": "1"}, {"TORCHELASTIC_RUN_ID": "b"}, {"MASTER_PORT": "3"}):
        given = {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "0", "MASTER_PORT": "2", **environment}
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        strategy = ConnectedDDP(timeout_seconds=60)
        strategy.cluster_environment, strategy.parallel_devices = LightningEnvironment(), [torch.device("cpu")] * 2
        strategy._connect()
    assert len(set(starts)) == 4


def test_patience_grows_with_the_number_of_ranks() -> None:
    assert [patience_seconds(ranks) for ranks in (2, 128, 512, 4096)] == [62, 188, 572, 600]


class Clock:
    """A clock that is a tenth of a second further at each look, from `start` on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now, self._step = time.monotonic(), 0.0
        monkeypatch.setattr(time, "monotonic", self.look)

    def start(self) -> None:
        self._step = 0.1

    def look(self) -> float:
        self._now += self._step
        return self._now


def test_ranks_that_are_missing(port: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 names them, after a while and at the end, and the ranks that have connected say the same.

    Time goes on when rank 2 has joined, and rank 0 stays until it has read the outcome.
    """
    clock, has_read, outcome, sleep = Clock(monkeypatch), threading.Event(), Rendezvous._outcome, time.sleep

    def read_outcome(meeting: Rendezvous, store: dist.Store) -> object:
        if meeting.rank:
            clock.start()
        found = outcome(meeting, store)
        if meeting.rank:
            has_read.set()
        return found

    def linger(seconds: float) -> None:
        has_read.wait(PATIENCE_SECONDS) if seconds == rendezvous._LINGER_SECONDS else sleep(seconds)

    monkeypatch.setattr(Rendezvous, "_outcome", read_outcome)
    monkeypatch.setattr(rendezvous, "_GRACE_SECONDS", math.inf)
    monkeypatch.setattr(time, "sleep", linger)
    first, second = meet([port], 4, [0, 2], 3)
    assert first == second
    assert first == (
        f"ranks 1, 3 (all of there) did not connect to rank 0 at {HOST}:{port} within 3 s; see their messages, or"
        " check their nodes and firewalls between nodes"
    )
    waiting = capsys.readouterr().err.splitlines()
    assert waiting.count(f"rank 0 waits for ranks 1, 3 (all of there) to connect to {HOST}:{port}") == 1
    assert len(waiting) == 1


@pytest.mark.parametrize(("rank", "whom"), [(1, "rank 0"), (0, "the agent of torchrun")])
def test_what_holds_the_store_is_missing(
    rank: int, whom: str, port: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(rank == 0))
    Clock(monkeypatch).start()
    [found] = meet([port], 2, [rank], 1.5)
    assert found.startswith(
        f"cannot connect to {whom} at {HOST}:{port} within 1.5 s (Connection refused); see its mess"
    )
    said = f"rank {rank} on here waits for {whom} at {HOST}:{port} (Connection refused)\n"
    assert capsys.readouterr().err == said


def test_rank_0_ends_before_all_have_met(port: int) -> None:
    set_key("7.0.0")
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    part = dist.PrefixStore(signature("store"), store)
    part.set("rendezvous/0", signed("rendezvous/0", {"settings": {"number of ranks": 2}}))

    def end() -> None:
        nonlocal store, part
        with socket.create_server((HOST, port)) as listener:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(signed(_STORE, store.port).encode())
        part.wait(["rendezvous/1"])
        del store, part

    ending = threading.Thread(target=end)
    ending.start()
    [found] = meet([port], 2, [1])
    ending.join()
    assert found == f"rank 0 at {HOST}:{port} has ended; see its messages, or check its node"


def test_a_port_that_is_in_use(port: int) -> None:
    with socket.create_server((HOST, port)):
        [found] = meet([port], 2, [0])
    assert found.startswith(f"cannot listen on {HOST}:{port} for other ranks (Address already in use); export another")


@pytest.fixture
def first_of_two(port: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make this process the first of two tasks, of which the other does not come; return what is said of that."""
    step = {"JOB_ID": "7", "STEP_ID": "0", "PROCID": "0", "LOCALID": "0", "NTASKS": "2"}
    step |= {"STEP_TASKS_PER_NODE": "1(x2)", "STEP_NODELIST": "node1,node2"}
    environment = {"SLURMD_NODENAME": "node1", "MASTER_ADDR": HOST, "MASTER_PORT": str(port)}
    for name, value in (environment | {f"SLURM_{name}": value for name, value in step.items()}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rendezvous, "node_name", lambda: "node1")
    monkeypatch.setattr(rendezvous, "patience_seconds", lambda ranks: ranks / 2)
    return (
        f"ranks 1 (all of node2) did not connect to rank 0 at {HOST}:{port} within 1 s; see their messages, or check"
        " their nodes and firewalls between nodes"
    )


def test_a_missing_rank_is_no_mistake_for_doctor(
    first_of_two: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another exit code, and no file that ends the job."""
    monkeypatch.setenv("MISTAKE_FILE", str(tmp_path / "mistake"))
    assert run_here("doctor", code=RANKS_MISSING)[0] == f"WRONG {first_of_two} [node1 rank 0]\n"
    assert not (tmp_path / "mistake").exists()
    monkeypatch.setenv("MASTER_PORT", "none")
    run_here("doctor", code=1)
    assert (tmp_path / "mistake").exists()


def test_fit_says_who_is_missing_in_one_line(first_of_two: str, recipe_file: Path, tmp_path: Path) -> None:
    """The exit code is that of a failure after which a job starts again."""
    _, said = run_here("fit", recipe_file, "--run.folder", tmp_path / "run", "--run.timeout_seconds", 1, code=1)
    up_to_date, backend, line = (one for one in said.splitlines() if not one.startswith("compiling "))
    assert up_to_date.endswith("is up to date")
    assert backend.startswith("backend: ")
    assert line == f"error: rank 0 on node1: {first_of_two}"


@pytest.mark.usefixtures("first_of_two")
@pytest.mark.parametrize(
    ("patched", "error", "code"),
    [
        ("getaddrinfo", socket.gaierror(socket.EAI_NONAME, "Name or service not known"), 1),
        ("getaddrinfo", UnicodeError("label empty or too long"), 1),
        ("getaddrinfo", socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), RANKS_MISSING),
        ("socket.bind", PermissionError(errno.EACCES, "Permission denied"), 1),
        ("socket.bind", OSError(errno.EADDRINUSE, "Address already in use"), RANKS_MISSING),
    ],
)
def test_an_address_is_a_mistake_if_it_would_fail_again(
    patched: str, error: Exception, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Name servers that do not answer now, and a port that is in use, may be there at the next start."""

    def fail(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(f"socket.{patched}", fail)
    [line] = run_here("doctor", code=code)[0].splitlines()
    says = f"the first node's name {HOST} does not resolve" if patched == "getaddrinfo" else "cannot listen on"
    assert line.startswith(f"WRONG {says}")
    assert f"({rendezvous.reason_of(error)}); " in line


def wait_in_vain(folder: Path, port: int, is_connected: bool, pipe: Connection) -> None:
    """Wait as rank 1 for rank 0, or for gloo on another rank that never comes."""
    signals.install()
    rendezvous._STOP_SECONDS = 0.2
    environment = LightningEnvironment()
    environment.set_world_size(2)
    os.environ |= {"LOCAL_RANK": "1", "MASTER_PORT": str(port)}
    strategy = ConnectedDDP(timeout_seconds=600)
    strategy.cluster_environment, strategy.parallel_devices = environment, [torch.device("cpu")] * 2
    if is_connected:
        Rendezvous.connect = lambda meeting: dist.FileStore(str(folder / "store"), 2)  # type: ignore[method-assign]
    pipe.send(True)
    try:
        strategy.setup_distributed()
    except signals.Stopped as stop:
        os._exit(stop.exit_code)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(("is_connected", "code"), [(False, signals.STOPPED), (True, -signal.SIGTERM)])
def test_a_rank_that_waits_for_another_ends_by_a_signal(
    is_connected: bool, code: int, tmp_path: Path, port: int
) -> None:
    """Also where it waits inside PyTorch, and no handler of Python's can run."""
    receive, send = FORK.Pipe(duplex=False)
    process = FORK.Process(target=wait_in_vain, args=(tmp_path, port, is_connected, send))
    process.start()
    receive.recv()
    assert process.pid is not None
    while process.is_alive():
        os.kill(process.pid, signal.SIGTERM)
        process.join(0.2)
    assert process.exitcode == code


def test_each_launch_has_a_port_and_a_secret_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two trainings that start at the same moment, none can get the other's port; a port of the user's stays."""
    launches = []
    for _ in range(2):
        monkeypatch.setenv("MASTER_PORT", "")
        monkeypatch.delenv("MASTER_PORT")
        strategy = ConnectedDDP(timeout_seconds=60)
        strategy.cluster_environment = LightningEnvironment()
        strategy.prepare_launch()
        launches.append((strategy, int(os.environ["MASTER_PORT"]), os.environ[RANKS_TOKEN]))
        assert strategy.cluster_environment.main_port == launches[-1][1]
        assert strategy._listener is not None
        assert strategy._listener.getsockname()[0] == HOST
        with pytest.raises(OSError, match="in use"):
            socket.create_server((HOST, launches[-1][1]))
    assert len({token for _, _, token in launches}) == 2
    strategy.prepare_launch()
    for launched, *_ in launches:
        launched._listener.close()
    assert (int(os.environ["MASTER_PORT"]), os.environ[RANKS_TOKEN] == launches[-1][2]) == (launches[-1][1], False)


def be_a_rank(meeting: Rendezvous, run: str, folder: Path, pipe: Connection) -> None:
    """Tell the test when this rank has first looked for the others; meet them, and write which runs they are of."""

    def arrive(*_: object) -> None:
        if not pipe.closed:
            pipe.send("arrived")
            pipe.close()

    def wait(original: object, *arguments: object) -> object:
        arrive()
        return original(*arguments)  # type: ignore[operator]

    for name in ("_wait_for_rank_0", "_outcome"):
        original = getattr(Rendezvous, name)
        setattr(Rendezvous, name, lambda *arguments, original=original: wait(original, *arguments))
    rendezvous._POLL_SECONDS = rendezvous._POLL_STRANGERS_SECONDS = 0.01
    try:
        store = meeting.connect()
        post(store, f"run/{meeting.rank}", run)
        keys = [f"run/{rank}" for rank in range(meeting.size)]
        store.wait(keys)
        found = " ".join(read(store, key) for key in keys)
        post(store, f"done/{meeting.rank}", "")
        if meeting.rank == 0:  # It holds the store.
            store.wait([f"done/{rank}" for rank in range(meeting.size)])
    except (InputError, RendezvousError) as error:
        found = f"{type(error).__name__}: {error}"
    arrive()
    (folder / f"{run}-{os.getpid()}").write_text(found)
    os._exit(0)


def met(folder: Path, ranks: Sequence[tuple[Rendezvous, str, str]]) -> dict[str, list[str]]:
    """Start ranks of runs one after another, each when the one before it has arrived; return what they have found.

    Args:
        folder: a new one.
        ranks: a rank, its run and its token; "" for none.
    """
    folder.mkdir()
    processes = []
    for meeting, run, token in ranks:
        receive, send = FORK.Pipe(duplex=False)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(RANKS_TOKEN, token)
            processes.append(FORK.Process(target=be_a_rank, args=(meeting, run, folder, send), daemon=True))
            processes[-1].start()
        send.close()
        assert receive.recv() == "arrived"
    for process in processes:
        process.join()
        assert process.exitcode == 0
    return {run: [path.read_text() for path in folder.glob(f"{run}-*")] for run in {run for _, run, _ in ranks}}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("starts", "tokens"),
    [(("7.0.0", "7.1.0"), ("a", "a")), (("7.0.0", "7.1.0"), ("", "")), (("7.0.0", "7.0.0"), ("a", "b"))],
    ids=["a token for two steps", "no tokens", "tokens alone"],
)
def test_ranks_of_two_runs_never_meet(tmp_path: Path, starts: tuple[str, str], tokens: tuple[str, str]) -> None:
    """In every order of arrival, up to the names of the runs, and with as many ranks or more in the other."""
    orders = [order for order in itertools.permutations(("a0", "a1", "b0", "b1")) if order[0].startswith("a")]
    for number, (order, more) in enumerate(
        [*((order, []) for order in orders), (orders[0], ["b2"]), (orders[5], ["b2"])]
    ):
        ports, ranks = free_ports(3), []
        for name in (*order, *more):
            index, rank = "ab".index(name[0]), int(name[1])
            size = 2 + len(more) * index
            meeting = Rendezvous(HOST, ports, rank, size, PATIENCE_SECONDS, start=starts[index])
            ranks.append((meeting, name[0], tokens[index]))
        found = met(tmp_path / f"{number}", ranks)
        assert found == {"a": ["a a"] * 2, "b": ["b b" + " b" * len(more)] * (2 + len(more))}, order


@pytest.mark.timeout(5 * PATIENCE_SECONDS)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(("token", "error"), [("a" * 64, InputError), ("", RendezvousError)])
@pytest.mark.parametrize(
    ("folder", "size", "line"),
    [
        ("/b", 3, "rank 1 on here was started otherwise than rank 0: run.folder /b, not /a; start all ranks"),
        ("/a", 4, "rank 1 on here was started otherwise than rank 0: number of ranks 4, not 3; start all ranks"),
        ("/a", 3, "two processes are rank 1, on here and here; start each once"),
    ],
)
def test_a_rank_that_was_started_otherwise_ends_all(
    folder: str, size: int, line: str, token: str, error: type[Exception], tmp_path: Path
) -> None:
    """At once, since the test's time is shorter than their patience, whoever comes first.

    Without a token, a stranger can have said so, and it is no mistake that ends a job.
    """
    arriving = range(3) if (folder, size) == ("/a", 3) else (0, 2)
    for number, order in enumerate(itertools.permutations(arriving)):
        ports = free_ports(2)
        first, second, other = (
            Rendezvous(HOST, ports, rank, ranks, 10 * PATIENCE_SECONDS, (), "7.0.0", {"run.folder": path})
            for rank, ranks, path in ((0, 3, "/a"), (1, 3, "/a"), (1, size, folder))
        )
        ranks = [((first, "a", token), (second, "a", token), (other, "b", token))[index] for index in order]
        found = met(tmp_path / f"{number}", ranks)
        # On a busy machine, rank 0 may have ended before another rank has read why.
        lines = {text for texts in found.values() for text in texts if "has ended; see its messages" not in text}
        assert len(lines) == 1
        assert lines.pop().startswith(f"{error.__name__}: {line}")


def test_strangers_that_connect_to_rank_0_do_not_keep_it_from_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """They send anything, or nothing, before it answers, and stay. They hear what only ranks of the start believe."""
    listener = socket.create_server((HOST, 0), backlog=500)
    port = listener.getsockname()[1]
    with ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection((HOST, port))) for _ in range(300)]
        for number, sent in enumerate((b"\n", b"GET / HTTP/1.1\r\n\r\n", b"[" * 100_000, b"x" * (1 << 22))):
            strangers[number].setblocking(False)
            strangers[number].send(sent)
        strangers[5].close()
        stores = meet([port], 2, [1, 0], listener=listener)
        assert all_have_met(stores)
        heard = strangers[6].recv(1000)
    inside = dist.TCPStore(HOST, verified(_STORE, heard), is_master=False)
    monkeypatch.setenv(RANKS_TOKEN, "b" * 64)
    set_key("7.0.0")  # The store has a secret name.
    strange = dist.PrefixStore(signature("store"), inside)
    assert [store.check(["rendezvous/0"]) for store in (*stores, strange)] == [True, True, False]
    with pytest.raises(StrangerError):
        verified(_STORE, heard)


def test_a_rank_goes_past_strangers_that_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's store, which says nothing, a program that greets, and one that repeats what rank 0 tells."""
    monkeypatch.setattr(rendezvous, "_POLL_STRANGERS_SECONDS", 0.01)
    monkeypatch.setattr(rendezvous, "_ATTEMPT_SECONDS", 0.5)  # until a stranger that says nothing is given up
    ports = free_ports(4)
    store = dist.TCPStore(HOST, ports[0], is_master=True, wait_for_workers=False)
    repeated: list[bytes] = []
    heard: list[bytes] = []

    def repeat() -> bytes:
        with suppress(ConnectionError), socket.create_connection((HOST, ports[3])) as connection:
            repeated.append(connection.recv(1000))
        return repeated[-1] if repeated else b"?"

    def stand_in(server: socket.socket, message: Callable[[], bytes]) -> None:
        while True:
            connection, _ = server.accept()
            with connection, suppress(ConnectionError):  # of a rank that has given this stranger up
                connection.sendall(message())
                heard.append(connection.recv(1 << 16))

    for port, message in ((ports[1], lambda: b"220 mail server"), (ports[2], repeat)):
        server = socket.create_server((HOST, port))
        threading.Thread(target=stand_in, args=(server, message), daemon=True).start()
    assert all_have_met(meet(ports, 2, [1, 0]))
    assert not store.check(["rendezvous/1"])
    assert repeated
    assert set(heard) <= {b""}  # A rank tells strangers nothing.


def test_a_value_that_no_rank_has_stored_is_refused() -> None:
    """Whoever finds the port of the store may write to it; what ranks have stored is printed without escapes."""
    store = dist.HashStore()
    set_key("7.0.0")
    post(store, "one", {"text": "\x1b[2J" + "x" * 5000})
    assert read(store, "one") == {"text": "\\x1b[2J" + "x" * 1996}
    store.set("another", store.get("one"))
    store.set("third", json.dumps("anything"))
    for name in ("another", "third"):
        with pytest.raises(RendezvousError, match="a stranger on the cluster has written"):
            read(store, name)


def without_a_network(recipe: Path, folder: Path) -> None:
    ctypes.CDLL(None).unshare(0x4000_0000)  # CLONE_NEWNET: the new network's loopback interface is down
    said = refusal("fit", recipe, "--trainer.devices", "2", "--run.folder", folder / "run")
    (folder / "said").write_text(said)
    os._exit(7)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a network of its own")
def test_a_machine_whose_loopback_interface_is_down(recipe_file: Path, tmp_path: Path) -> None:
    """It is refused before ranks are started."""
    process = FORK.Process(target=without_a_network, args=(recipe_file, tmp_path))
    process.start()
    process.join()
    assert process.exitcode == 7
    wrong = r"error: processes of this machine cannot connect to one another at 127\.0\.0\.1 \(.*\); bring its loopback"
    assert re.match(wrong, (tmp_path / "said").read_text())
    assert not (tmp_path / "run").exists()
