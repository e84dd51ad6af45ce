"""Start the project's commands in forks of a process that has already imported PyTorch and Lightning.

`python -m pipeline ...` needs four seconds of CPU time for these imports, and the tests run it hundreds of times. A
fork is a normal process, with its own exit code, output, signals and children. It has imported nothing of the project.

    process = ForkServer.shared().start("pipeline", ["fit", ...], environment=..., stderr=...)

A fork leads a process group of its own, and the group is killed if its client ends or closes the connection.
Run as a script, this file is the server. It is single-threaded, which makes forking safe.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, TypedDict

_END_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of Linux."""
FORKED_PYTHON = "FORKED_PYTHON"
"""Environment variable: a server's `python`, by which a forked process starts modules in turn."""


class Request(TypedDict):
    module: str
    arguments: list[str]
    environment: dict[str, str]
    cwd: str


class ForkedProcess:
    """The part of `subprocess.Popen` that the tests use. Output is written to files, so that no process waits."""

    def __init__(self, connection: socket.socket, args: list[str], output: list[IO[bytes]]) -> None:
        self.args = args
        self.returncode: int | None = None
        self._connection = connection
        self._answers = connection.makefile("rb", buffering=0)
        self._files = output
        self._output = [b"" for _ in output]
        self.pid = int(self._answers.readline())

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process to end; raises `subprocess.TimeoutExpired`."""
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._connection, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = int(self._answers.readline())
            self._answers.close()
            self._connection.close()
            for number, file in enumerate(self._files):
                with file:
                    file.seek(0)
                    self._output[number] = file.read()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[bytes, bytes]:
        """Wait, and return standard output and error; raises `subprocess.TimeoutExpired`."""
        self.wait(timeout)
        return self._output[0], self._output[1]

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """Starts the server and sends requests to it."""

    @classmethod
    @cache
    def shared(cls) -> "ForkServer":
        """Return the server of this test process; the first call starts it."""
        server = cls()
        atexit.register(server.close)
        return server

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fork-server-")
        self._address = str(Path(self._folder.name) / "socket")
        client, python = Path(__file__).with_name("forked_python.py").resolve(), Path(self._folder.name) / "python"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} -IS {client} {self._address} "$@"\n')
        python.chmod(0o755)
        self.python = str(python)
        """A command that takes Python's place in starting modules: see forked_python.py."""
        self.for_children = {FORKED_PYTHON: self.python}
        """The environment of a process whose own processes, such as other ranks, are to be forks too."""
        # A forked process cannot start itself anew in another encoding.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1", "PYTHONIOENCODING": "utf-8"}
        command = [sys.executable, str(Path(__file__).resolve()), self._address]
        self._process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
        while not Path(self._address).exists():
            if self._process.poll() is not None:
                raise RuntimeError("the fork server did not start")
            time.sleep(0.02)

    def start(
        self,
        module: str,
        arguments: list[str],
        *,
        environment: dict[str, str],
        cwd: Path | None = None,
        given: bytes = b"",
        stderr: int | IO[bytes] | None = None,
    ) -> ForkedProcess:
        """Start `python -m module arguments`, with `given` as standard input; a file or descriptor may be `stderr`."""
        output = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115, `wait` closes them
        errors = output[1] if stderr in (None, subprocess.PIPE, subprocess.DEVNULL) else stderr
        request = Request(module=module, arguments=arguments, environment=environment, cwd=str(cwd or Path.cwd()))
        data = json.dumps(request).encode() + b"\n"
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(self._address)
        with tempfile.TemporaryFile() as stdin:
            stdin.write(given)
            stdin.seek(0)
            descriptors = [one if isinstance(one, int) else one.fileno() for one in (stdin, output[0], errors)]
            sent = socket.send_fds(connection, [data], descriptors)
        connection.sendall(data[sent:])
        return ForkedProcess(connection, [sys.executable, "-m", module, *arguments], output)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._folder.cleanup()


def serve(address: str) -> Request:
    """Fork for each request. Returns in the forked process only, with the request."""
    parent = os.getppid()
    for name in ("lightning.pytorch", "sacrebleu", "sentencepiece", "torch.utils.tensorboard"):
        importlib.import_module(name)
    # A test that has trained in its own process ignores them, as do the programs that it starts.
    for signum in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address + ".new")
    listener.listen(64)
    Path(address + ".new").rename(address)
    gc.freeze()
    running: dict[int, socket.socket] = {}
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    end_with_parent = ctypes.CDLL(None).prctl
    while os.getppid() == parent:
        for key, _ in selector.select(1.0):
            child = key.data
            if child and isinstance(key.fileobj, socket.socket):
                if child in running:  # The client has ended: it sends nothing after its request.
                    selector.unregister(key.fileobj)
                    os.killpg(child, signal.SIGKILL)
                continue
            if child:
                selector.unregister(key.fd)
                os.close(key.fd)
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                with running.pop(child) as connection:
                    if connection in selector.get_map():
                        selector.unregister(connection)
                    _say(connection, code)
                continue
            connection, _ = listener.accept()
            request, streams = _request(connection)
            child = os.fork()
            if child == 0:
                end_with_parent(_END_WITH_PARENT, signal.SIGKILL)
                os.setpgid(0, 0)
                selector.close()
                listener.close()
                connection.close()
                for other in running.values():
                    other.close()
                for number, stream in enumerate(streams):
                    os.dup2(stream, number)
                for stream in streams:
                    os.close(stream)
                return request
            for stream in streams:
                os.close(stream)
            with suppress(PermissionError):  # It has done so itself and executed another program.
                os.setpgid(child, child)
            running[child] = connection
            selector.register(os.pidfd_open(child), selectors.EVENT_READ, child)
            selector.register(connection, selectors.EVENT_READ, child)
            _say(connection, child)
    sys.exit()


def _say(connection: socket.socket, number: int) -> None:
    with suppress(OSError):  # the client has closed the connection
        connection.sendall(f"{number}\n".encode())


def _request(connection: socket.socket) -> tuple[Request, list[int]]:
    data, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    while not data.endswith(b"\n"):
        data += connection.recv(1 << 20)
    return json.loads(data), list(streams)


def become(request: Request) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # The tests may run under nohup, which ignores it.
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # The temporary folder may be another one now.
    added = [path for path in request["environment"].get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [request["cwd"], *added, *sys.path[1:]]
    sys.argv = [request["module"], *request["arguments"]]
    sys.executable = os.environ.get(FORKED_PYTHON, sys.executable)
    sys.orig_argv[:] = [sys.executable, "-m", *sys.argv]
    if "PYTHONUNBUFFERED" in os.environ:
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    code: int | str | None = 0
    try:
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    # Exit as the interpreter does, but keep the modules: destroying them would copy the server's memory pages.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    become(serve(sys.argv[1]))
