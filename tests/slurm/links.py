"""Nodes in separate network namespaces, each with a link to a switch that can be cut. Needs root."""

import os
import random
import shutil
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path


class Links:
    """A bridge that connects this machine with a network namespace for each node."""

    def __init__(self, num_nodes: int) -> None:
        number = os.getpid()
        self._switch = f"sw{number}"
        prefix = f"10.{180 + number % 60}.{number // 60 % 250}"
        self.controller = f"{prefix}.1"
        self.nodes = [f"{prefix}.{11 + node}" for node in range(num_nodes)]
        self._names = {address: f"sw{number}n{node}" for node, address in enumerate(self.nodes)}

    def start(self) -> None:
        """Connect all nodes. A node's own name resolves to the loopback address, as on many clusters."""
        ip("link", "add", self._switch, "type", "bridge")
        ip("addr", "add", f"{self.controller}/24", "dev", self._switch)
        ip("link", "set", self._switch, "up")
        for address, name in self._names.items():
            ip("netns", "add", name)
            ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", name, "master", self._switch, "up")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                ip("-n", name, "link", "set", device, "up")
            # Inside the namespace, these files replace those in /etc.
            inside = Path("/etc/netns") / name
            inside.mkdir(parents=True)
            (inside / "hosts").write_text(f"127.0.0.1 localhost {socket.gethostname()}\n")

    def stop(self) -> None:
        """Kill all processes in the namespaces, which would keep them alive, and remove the network."""
        for name in self._names.values():
            listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout
            for pid in map(int, listed.split()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL, check=False)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)
        subprocess.run(["ip", "link", "delete", self._switch], stderr=subprocess.DEVNULL, check=False)

    def inside(self, node: str) -> list[str]:
        """Return the prefix of a command that is to run on a node."""
        return ["ip", "netns", "exec", self._names[node]]

    def cut(self, node: str) -> None:
        """Drop all packets to and from a node, without an error."""
        ip("link", "set", self._names[node], "down")

    def mend(self, node: str) -> None:
        ip("link", "set", self._names[node], "up")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def free_ports(count: int) -> list[int]:
    """Return ports that no process listens on: neither of those that the system chooses from nor of jobs' ports."""
    ports: set[int] = set()
    while len(ports) < count:
        port = random.SystemRandom().randrange(26_000, 32_000)
        with suppress(OSError), socket.socket() as one:
            one.bind(("", port))
            ports.add(port)
    return list(ports)
