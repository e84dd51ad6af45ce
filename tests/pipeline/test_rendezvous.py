"""Ranks that connect to one another, and what is said of those that do not."""

import errno
import multiprocessing
import os
import shutil
import signal
import socket
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import LightningEnvironment

from pipeline.__main__ import main
from pipeline.runtime import rendezvous, signals
from pipeline.runtime.console import RendezvousError
from pipeline.runtime.launch import RANKS_MISSING
from pipeline.runtime.rank_messages import set_key, signed
from pipeline.runtime.ranks_token import RANKS_TOKEN
from pipeline.runtime.rendezvous import _STORE, Rendezvous, _own_part, patience_seconds
from pipeline.training.trainer import ConnectedDDP
from tests.conftest import pipeline

HOST, TOKEN = "127.0.0.1", "a" * 64


@pytest.fixture
def port() -> int:
    with socket.create_server((HOST, 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RANKS_TOKEN, TOKEN)
    monkeypatch.setattr(rendezvous, "NOTICE_SECONDS", 1.0)
    monkeypatch.setattr(rendezvous, "node_name", lambda: "here")


def outcomes(port: int, size: int, ranks: list[int], timeout_seconds: float) -> list[str]:
    """What some ranks of a run find, each in a thread: an empty string if all have connected."""
    found, stores = [""] * len(ranks), []

    def connect(index: int) -> None:
        meeting = Rendezvous(HOST, [port], ranks[index], size, timeout_seconds, ["here", "there"])
        try:
            stores.append(meeting.connect())
        except RendezvousError as error:
            found[index] = str(error)

    threads = [threading.Thread(target=connect, args=(index,)) for index in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_all_ranks_meet(port: int) -> None:
    assert outcomes(port, 3, [2, 0, 1], 60) == ["", "", ""]


def test_ranks_that_torchrun_has_started_again_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent's store still has what rank 0 of the start before has told."""
    agent = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.delenv(RANKS_TOKEN)
    monkeypatch.setattr(rendezvous.secrets, "token_hex", lambda _: TOKEN)  # threads share their key
    for _ in range(2):
        assert outcomes(agent.port, 3, [2, 1, 0], 60) == ["", "", ""]


def test_patience_grows_with_the_number_of_ranks() -> None:
    assert [patience_seconds(ranks) for ranks in (2, 128, 512, 4096)] == [62, 188, 572, 600]


def test_ranks_that_are_missing(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 0 names them, after a while and at the end, and the ranks that have connected say the same."""
    first, second = outcomes(port, 4, [0, 2], 3)
    assert first == second
    assert first == (
        f"ranks 1, 3 (all of there) did not connect to rank 0 at {HOST}:{port} within 3 s; see their messages, or"
        " check their nodes and firewalls between nodes"
    )
    waiting = capsys.readouterr().err.splitlines()
    assert waiting.count(f"rank 0 waits for ranks 1, 3 (all of there) to connect to {HOST}:{port}") == 1
    assert len(waiting) == 1


def test_rank_0_is_missing(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    [found] = outcomes(port, 2, [1], 1.5)
    assert found.startswith(
        f"cannot connect to rank 0 at {HOST}:{port} within 1.5 s (Connection refused); see its mess"
    )
    assert capsys.readouterr().err == f"rank 1 on here waits for rank 0 at {HOST}:{port} (Connection refused)\n"


def test_rank_0_ends_before_all_have_met(port: int) -> None:
    set_key(TOKEN, "")
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    part = _own_part(store)
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
    [found] = outcomes(port, 2, [1], timeout_seconds=60)
    ending.join()
    assert found == f"rank 0 at {HOST}:{port} has ended; see its messages, or check its node"


def test_a_port_that_is_in_use(port: int) -> None:
    with socket.create_server((HOST, port)):
        [found] = outcomes(port, 2, [0], 60)
    assert found.startswith(f"cannot listen on {HOST}:{port} for other ranks (Address already in use); export another")


def test_a_name_that_does_not_resolve(port: int) -> None:
    with pytest.raises(RendezvousError, match=r"^the first node's name no\.such\.node\.invalid does not resolve \("):
        Rendezvous("no.such.node.invalid", [port], 1, 2, 60).connect()


FIRST_OF_TWO = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "node1,node2",
    "SLURMD_NODENAME": "node1",
    "MASTER_ADDR": HOST,
}


def test_a_missing_rank_is_no_mistake_for_doctor(
    port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another exit code, and no file that ends the job."""
    for name, value in {**FIRST_OF_TWO, "MASTER_PORT": str(port), "MISTAKE_FILE": str(tmp_path / "mistake")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rendezvous, "node_name", lambda: "node1")
    monkeypatch.setattr(rendezvous, "patience_seconds", lambda ranks: ranks / 2)
    assert main(["doctor"]) == RANKS_MISSING
    assert capsys.readouterr().out == (
        f"WRONG ranks 1 (all of node2) did not connect to rank 0 at {HOST}:{port} within 1 s; see their messages, or"
        " check their nodes and firewalls between nodes [node1 rank 0]\n"
    )
    assert not (tmp_path / "mistake").exists()
    monkeypatch.setenv("MASTER_PORT", "none")
    assert main(["doctor"]) == 1
    assert (tmp_path / "mistake").exists()


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
    patched: str, error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Name servers that do not answer now, and a port that is in use, may be there at the next start."""

    def fail(*arguments: object, **options: object) -> None:
        raise error

    for name, value in {**FIRST_OF_TWO, "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(f"socket.{patched}", fail)
    assert main(["doctor"]) == code
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("WRONG ")
    assert f"({rendezvous.reason_of(error)}); " in line


def test_fit_says_who_is_missing_in_one_line(recipe_file: Path, tmp_path: Path, port: int) -> None:
    """The first of two tasks. The exit code is that of a failure after which a job starts again."""
    environment = {
        **{name: "" for name in os.environ if name.startswith("SLURM_")},
        **FIRST_OF_TWO,
        "MASTER_PORT": str(port),
    }
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    options = ["--run.folder", tmp_path / "run", "--run.timeout_seconds", 1]
    done = pipeline("fit", recipe_file, *options, environment=environment)
    [up_to_date, backend, line] = done.stderr.decode().splitlines()
    assert up_to_date.endswith("is up to date")
    assert backend.startswith("backend: ")
    assert line == (
        f"error: rank 0 on node1: ranks 1 (all of node2) did not connect to rank 0 at {HOST}:{port} within 1 s; see"
        " their messages, or check their nodes and firewalls between nodes"
    )
    assert done.returncode == 1


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
    fork = multiprocessing.get_context("fork")
    receive, send = fork.Pipe(duplex=False)
    process = fork.Process(target=wait_in_vain, args=(tmp_path, port, is_connected, send))
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
        with pytest.raises(OSError, match="in use"):
            socket.create_server((HOST, launches[-1][1]))
    assert len({token for _, _, token in launches}) == 2
    strategy.prepare_launch()
    for launched, *_ in launches:
        launched._listener.close()
    assert (int(os.environ["MASTER_PORT"]), os.environ[RANKS_TOKEN] == launches[-1][2]) == (launches[-1][1], False)
