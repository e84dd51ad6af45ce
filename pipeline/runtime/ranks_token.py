"""The secret token of a start, by which its ranks recognize one another; it is never sent.

The job script or the launcher gives each start a token in RANKS_TOKEN. Without one, rank 0 writes it to a file that
only this user can read.
"""

import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from data_module.errors import InputError
from data_module.files import open_in_place

RANKS_TOKEN = "RANKS_TOKEN"
"""Environment variable: the secret token of a start; each start has another one."""


def find_token(name: str, folders: Sequence[Path]) -> str | None:
    """Return the token of the start `name`, from the environment or the first folder that has it; else None.

    A file that others could have written or read is ignored: another user's, a link, or one with other permissions.
    """
    if token := os.environ.get(RANKS_TOKEN):
        return token
    for folder in folders:
        with suppress(OSError):  # Rank 0 has not written it yet, or not here.
            descriptor = open_in_place(_token_path(folder, name), os.O_RDONLY)
            with os.fdopen(descriptor, encoding="ascii", errors="replace") as file:
                found = os.fstat(descriptor)
                is_own = found.st_uid == os.geteuid() and not found.st_mode & 0o077
                if is_own and len(token := file.read(65)) == 64:
                    return token
    return None


def write_token(name: str, folders: Sequence[Path]) -> str:
    """Write a new token for the start `name` to each folder that can be written, and return it.

    Raises InputError if none of them can be written.
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
    """Remove the files that `write_token` has written."""
    for folder in folders:
        with suppress(OSError):  # It was not written here.
            _token_path(folder, name).unlink()


def _token_path(folder: Path, name: str) -> Path:
    return folder / f".ranks-{name}"
