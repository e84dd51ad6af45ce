"""Stands for Python where a program or a job starts `python -m MODULE ...`: a fork of the fork server runs the module.

    python forked_python.py ADDRESS -m MODULE ...

Signals reach the module, which ends with this process, as this one ends with it. Other programs get Python itself.
"""

import json
import os
import signal
import socket
import sys
from contextlib import suppress

# Without pathlib, which takes as long to import as all of this.
FORWARDED = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGCONT}

address, *words = sys.argv[1:]
if words[:1] == ["-u"]:  # as torchrun starts ranks
    os.environ["PYTHONUNBUFFERED"] = words.pop(0)
if words[:1] != ["-m"]:
    os.execv(sys.executable, [sys.executable, *words])
signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
request = {"module": words[1], "arguments": words[2:], "environment": dict(os.environ), "cwd": os.getcwd()}  # noqa: PTH109
data = json.dumps(request).encode() + b"\n"
connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
connection.connect(address)
connection.sendall(data[socket.send_fds(connection, [data], [0, 1, 2]) :])
answers = connection.makefile("rb", buffering=0)
child = int(answers.readline())
with open("/proc/self/comm", "w") as name:  # noqa: PTH123
    name.write(f"for-{child}")  # test clusters find the module's process by it; SLURM takes no name with a space


def forward(signum: int, _: object) -> None:
    with suppress(ProcessLookupError):  # the module has just ended
        os.killpg(child, signum)


for number in FORWARDED:
    signal.signal(number, forward)
signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
code = int(answers.readline())
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
