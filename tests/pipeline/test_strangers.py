"""The ranks of one start meet, whoever else connects or listens, and in whatever order they arrive."""

import itertools
import json
import multiprocessing
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch.distributed as dist

from data_module.errors import InputError
from pipeline.runtime import rendezvous
from pipeline.runtime.console import RendezvousError
from pipeline.runtime.rank_messages import StrangerError, post, read, set_key, verified
from pipeline.runtime.ranks_token import RANKS_TOKEN, find_token, remove_token, write_token
from pipeline.runtime.rendezvous import _STORE, Rendezvous, _own_part

HOST = "127.0.0.1"
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


def be_a_rank(meeting: Rendezvous, run: str, folder: Path, pipe: Connection) -> None:
    """Tell the test when this rank has first looked for the others; meet them, and write which runs they are of."""

    def arrive(*_: object) -> None:
        if not pipe.closed:
            pipe.send("arrived")
            pipe.close()

    def wait(original: object, *arguments: object) -> object:
        arrive()
        return original(*arguments)  # type: ignore[operator]

    for name in ("_wait_for_rank_0", "_wait_for_all", "_wait_for_outcome"):
        original = getattr(Rendezvous, name)
        setattr(Rendezvous, name, lambda *arguments, original=original: wait(original, *arguments))
    rendezvous._POLL_SECONDS = rendezvous._POLL_STRANGERS_SECONDS = 0.01
    os.chdir(folder)
    os.environ["HOME"] = str(folder)
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
        ranks: a rank, its run and its token; "" for one in a file.
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
    ids=["a token for two steps", "tokens in files", "tokens alone"],
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
        assert not list((tmp_path / f"{number}").glob(".ranks-*"))


@pytest.mark.timeout(PATIENCE_SECONDS)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("token", ["a" * 64, ""], ids=["a token", "a token in a file"])
@pytest.mark.parametrize(
    ("folder", "size", "line"),
    [
        ("/b", 3, "rank 1 on here was started otherwise than rank 0: run.folder /b, not /a; start all ranks"),
        ("/a", 4, "rank 1 on here was started otherwise than rank 0: number of ranks 4, not 3; start all ranks"),
        ("/a", 3, "two processes are rank 1, on here and here; start each once"),
    ],
)
def test_a_rank_that_was_started_otherwise_ends_all(
    folder: str, size: int, line: str, token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, since the test's time is shorter than their patience, whoever comes first."""
    monkeypatch.setattr(rendezvous, "node_name", lambda: "here")
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
        assert lines.pop().startswith(f"InputError: {line}")


def meet_in_threads(ports: list[int], listener: socket.socket | None = None) -> list[dist.Store]:
    """Let ranks 1 and 0 meet; return their stores."""
    stores: list[dist.Store] = []
    meetings = [Rendezvous(HOST, ports, rank, 2, PATIENCE_SECONDS, start="7.0.0") for rank in (1, 0)]
    meetings[1].listener = listener
    threads = [threading.Thread(target=lambda one=one: stores.append(one.connect()), daemon=True) for one in meetings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return stores


def test_strangers_that_connect_to_rank_0_do_not_keep_it_from_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """They send anything, or nothing, before it answers, and stay. They hear what only ranks of the start believe."""
    monkeypatch.setenv(RANKS_TOKEN, "a" * 64)
    listener = socket.create_server((HOST, 0), backlog=500)
    port = listener.getsockname()[1]
    with ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection((HOST, port))) for _ in range(300)]
        for number, sent in enumerate((b"\n", b"GET / HTTP/1.1\r\n\r\n", b"[" * 100_000, b"x" * (1 << 22))):
            strangers[number].setblocking(False)
            strangers[number].send(sent)
        strangers[5].close()
        stores = meet_in_threads([port], listener)
        assert len(stores) == 2
        heard = strangers[6].recv(1000)
    inside = dist.TCPStore(HOST, verified(_STORE, heard), is_master=False)
    set_key("b" * 64, "7.0.0")  # The store has a secret name.
    assert [store.check(["rendezvous/0"]) for store in (*stores, _own_part(inside))] == [True, True, False]
    with pytest.raises(StrangerError):
        verified(_STORE, heard)


def test_a_rank_goes_past_strangers_that_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's store, which says nothing, a program that greets, and one that repeats what rank 0 tells."""
    monkeypatch.setenv(RANKS_TOKEN, "a" * 64)
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
            with connection:
                connection.sendall(message())
                heard.append(connection.recv(1 << 16))

    for port, message in ((ports[1], lambda: b"220 mail server"), (ports[2], repeat)):
        server = socket.create_server((HOST, port))
        threading.Thread(target=stand_in, args=(server, message), daemon=True).start()
    assert len(meet_in_threads(ports)) == 2
    assert not store.check(["rendezvous/1"])
    assert repeated
    assert set(heard) == {b""}  # A rank tells strangers nothing.


def test_a_value_that_no_rank_has_stored_is_refused() -> None:
    """Whoever finds the port of the store may write to it; what ranks have stored is printed without escapes."""
    store = dist.HashStore()
    set_key("a" * 64, "7.0.0")
    post(store, "one", {"text": "\x1b[2J" + "x" * 5000})
    assert read(store, "one") == {"text": "\\x1b[2J" + "x" * 1996}
    store.set("another", store.get("one"))
    store.set("third", json.dumps("anything"))
    for name in ("another", "third"):
        with pytest.raises(RendezvousError, match="a stranger on the cluster has written"):
            read(store, name)


def test_a_token_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is this user's alone, is found in any of the folders, and is no longer there after the meeting."""
    monkeypatch.delenv(RANKS_TOKEN, raising=False)
    folders = [tmp_path / "missing", tmp_path / "one", tmp_path / "other"]
    for folder in folders[1:]:
        folder.mkdir()
    target = tmp_path / "target"
    target.write_text("precious")
    (folders[1] / ".ranks-7.0.0").symlink_to(target)  # planted before
    token = write_token("7.0.0", folders)
    assert target.read_text() == "precious"
    file = folders[1] / ".ranks-7.0.0"
    assert file.stat().st_mode & 0o777 == 0o600
    assert not file.is_symlink()
    assert find_token("7.0.0", folders) == find_token("7.0.0", folders[2:]) == token
    assert find_token("7.0.1", folders) is None
    file.chmod(0o640)
    assert find_token("7.0.0", folders[:2]) is None
    file.unlink()
    target.write_text(token)
    target.chmod(0o600)
    file.symlink_to(target)
    assert find_token("7.0.0", folders[:2]) is None
    file.unlink()
    os.mkfifo(file, 0o600)
    assert find_token("7.0.0", folders[:2]) is None
    file.unlink()
    if os.geteuid() == 0:
        file.write_text(token)
        file.chmod(0o600)
        os.chown(file, 12345, 12345)
        assert find_token("7.0.0", folders[:2]) is None
    remove_token("7.0.0", folders)
    assert find_token("7.0.0", folders) is None
    with pytest.raises(InputError, match=r"^cannot write \.ranks-7\.0\.0 to .*; export RANKS_TOKEN="):
        write_token("7.0.0", folders[:1])


def test_ranks_of_one_machine_need_no_home_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working folder and the home are read-only for root as well; the temporary folder holds the token."""
    monkeypatch.delenv(RANKS_TOKEN, raising=False)
    monkeypatch.setenv("HOME", "/proc")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir("/proc")
    ports = free_ports(1)
    assert len(meet_in_threads(ports)) == 2
    assert not list(tmp_path.iterdir())
    assert tmp_path not in Rendezvous("localhost", ports, 0, 2, PATIENCE_SECONDS)._folders
