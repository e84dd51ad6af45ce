"""Files written whole or not at all, and a full disk found behind whatever error it became."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """A file under a temporary name, at the end flushed to the disk and renamed: what has the name is whole.

    After an error nothing is left of it; one that a full disk is behind names the file.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if (full := disk_full_error(error)) is not None:
            full.filename = str(path)
        if isinstance(error, OSError) and str(error.filename) == str(temporary):
            error.filename = str(path)
        raise


def is_temporary_file(entry: Path, name: str) -> bool:
    """Whether a process that was killed while it wrote a file of this name has left the entry; "" is any name."""
    return entry.name.startswith(f".{name}") and entry.name.endswith(".tmp")


def remove_temporary_files(folder: Path, name: str) -> None:
    """Remove what killed processes have left of a file; none may be writing it now."""
    for entry in folder.glob(".*.tmp"):
        if is_temporary_file(entry, name):
            entry.unlink()


def disk_full_error(error: BaseException) -> OSError | None:
    """The full disk, used-up quota or size limit behind an error; libraries raise errors of their own in its place."""
    return next((e for e in behind(error) if isinstance(e, OSError) and e.errno in _NO_ROOM), None)


def behind(error: BaseException | None) -> list[BaseException]:
    """An error, and those that it came from."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:  # TensorBoard raises one error twice: it came from itself
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain
