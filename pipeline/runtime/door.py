"""Tells the ranks of one start from strangers: a secret token, and who is let into the key-value store by it.

PyTorch's store takes everybody who connects, and the port at which ranks meet follows from the job's number. So rank 0
opens a door at that port, and its store at another one that only it knows. A rank that knocks and rank 0 prove to each
other that they have the token, without sending it: each answers the other's random number with an HMAC of both numbers.
Then the rank says who it is, and rank 0 tells it where the store is, both signed in the same way.

    rank                                       rank 0
    its number                            ->
                                          <-   its number, proof
    who it is, proof                      ->
                                          <-   port and name of the store or what is wrong, proof

The key of the HMAC is the token with the names of job, step and start. The job script or the launcher gives each start
a token in RANKS_TOKEN. Without one, rank 0 writes it to a file that only this user can read.
"""

import hashlib
import hmac
import json
import os
import secrets
import socket
import stat
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from data_module.errors import InputError

RANKS_TOKEN = "RANKS_TOKEN"
"""Environment variable: the secret of a start, made anew for each one."""

_HELLO_BYTES = 256
_MESSAGE_BYTES = 1 << 22
_SECONDS = 5.0
"""How long one message may take, from the first byte to the last."""

_NO_ANSWER = (OSError, ValueError, LookupError, TypeError, RecursionError)
"""A stranger may send anything, or nothing."""


class StrangerError(ConnectionError):
    """Whoever listens or knocks has not proven that it has the token."""

    strerror = "another run or program listens there"


def find_token(name: str, folders: Sequence[Path]) -> str | None:
    """Return the token of the start `name`, from the environment or from the first folder that has it; None without.

    A file that others could have written or read is none: one of another user, a link, or one with other permissions.
    """
    if token := os.environ.get(RANKS_TOKEN):
        return token
    for folder in folders:
        with suppress(OSError):  # Rank 0 has not written it yet, or not here.
            descriptor = os.open(_token_path(folder, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(descriptor, encoding="ascii", errors="replace") as file:
                found = os.fstat(descriptor)
                is_own = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
                if is_own and len(token := file.read(65)) == 64:
                    return token
    return None


def write_token(name: str, folders: Sequence[Path]) -> str:
    """Write a new token for the start `name` to each folder where this is possible, and return it.

    Raises InputError if it is possible in none.
    """
    token, written = secrets.token_hex(32), False
    for folder in folders:
        with suppress(OSError):  # another folder may do
            path = _token_path(folder, name)
            path.unlink(missing_ok=True)  # of a killed start, or planted
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(token)
            written = True
    if not written:
        places = ", ".join(map(str, folders))
        raise InputError(f"cannot write {_token_path(Path(), name)} to {places}; export {RANKS_TOKEN}=a long secret")
    return token


def remove_token(name: str, folders: Sequence[Path]) -> None:
    """Remove what `write_token` has written."""
    for folder in folders:
        with suppress(OSError):  # It was not written here.
            _token_path(folder, name).unlink()


def _token_path(folder: Path, name: str) -> Path:
    return folder / f".ranks-{name}"


def key_of(token: str, *names: str) -> bytes:
    """Return a key that follows from a token, and is another one for other names."""
    return hmac.new(token.encode(), json.dumps(names).encode(), hashlib.sha256).digest()


class Door:
    """Rank 0's end: lets those in who have the key, each in a thread of its own, until it is closed."""

    def __init__(self, listener: socket.socket, key: bytes, admit: Callable[[Any], Any]) -> None:
        """Open the door.

        Args:
            listener: a socket that listens; `close` closes it.
            key: what both sides have.
            admit: takes what a rank has said of itself, and returns what to tell it. Any thread may call it.
        """
        self.refused = 0
        """Number of those who came without the key."""
        self._listener, self._key, self._admit = listener, key, admit
        self._closed = threading.Event()
        listener.settimeout(0.1)
        self._thread = threading.Thread(target=self._open, daemon=True, name="door")
        self._thread.start()

    def close(self) -> None:
        """Let nobody in any more."""
        self._closed.set()
        self._thread.join()
        self._listener.close()

    def _open(self) -> None:
        while not self._closed.is_set():
            with suppress(OSError):  # nobody has knocked meanwhile
                connection, _ = self._listener.accept()
                try:
                    threading.Thread(target=self._answer, args=(connection,), daemon=True).start()
                except RuntimeError:  # So many have knocked that there is no thread left; a rank comes again.
                    connection.close()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            try:
                numbers = [_receive(connection, _HELLO_BYTES)["number"], secrets.token_hex(16)]
                _send(connection, number=numbers[1], proof=_proof(self._key, "rank 0", numbers))
                message = _checked(self._key, "rank", numbers, _receive(connection, _MESSAGE_BYTES))
            except _NO_ANSWER:
                self.refused += 1
                return
            answer = json.dumps(self._admit(json.loads(message)))
            with suppress(OSError):  # The rank has ended.
                _send(connection, message=answer, proof=_proof(self._key, "answer", [*numbers, answer]))


def knock(address: tuple[str, int], key: bytes, message: Any) -> Any:
    """Prove to rank 0 that this rank has the key, say who it is, and return the answer.

    Raises:
        StrangerError: who listens there does not have the key.
        OSError: nobody listens there.
    """
    with socket.create_connection(address, timeout=_SECONDS) as connection:
        try:
            number = secrets.token_hex(16)
            _send(connection, number=number)
            hello = _receive(connection, _HELLO_BYTES)
            numbers = [number, hello["number"]]
            if not _matches(hello["proof"], _proof(key, "rank 0", numbers)):
                raise StrangerError
            text = json.dumps(message)
            _send(connection, message=text, proof=_proof(key, "rank", [*numbers, text]))
            return json.loads(_checked(key, "answer", numbers, _receive(connection, _MESSAGE_BYTES)))
        except _NO_ANSWER:
            raise StrangerError from None


def _proof(key: bytes, who: str, parts: list[str]) -> str:
    return hmac.new(key, json.dumps([who, *parts]).encode(), hashlib.sha256).hexdigest()


def _matches(proof: str, expected: str) -> bool:
    return hmac.compare_digest(str(proof).encode(errors="replace"), expected.encode())


def _checked(key: bytes, who: str, numbers: list[str], received: dict[str, str]) -> str:
    if not _matches(received["proof"], _proof(key, who, [*numbers, received["message"]])):
        raise StrangerError
    return received["message"]


def _send(connection: socket.socket, **parts: str) -> None:
    connection.sendall(json.dumps(parts).encode() + b"\n")


def _receive(connection: socket.socket, most_bytes: int) -> Any:
    """Return the JSON of one line."""
    line, deadline = bytearray(), time.monotonic() + _SECONDS
    while not line.endswith(b"\n"):
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        part = connection.recv(1 << 16)
        line += part
        if not part or len(line) > most_bytes:
            raise StrangerError
    return json.loads(line)
