"""Files written as a whole or not at all, and full disks recognized behind other errors."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file; at the end flush it to the disk and rename it to `path`.

    Whatever has the name `path` is therefore complete. After an error nothing is left of the temporary file; an error
    that comes from a full disk names `path`.
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
    """Return whether a killed process left `entry` while writing the file `name`; "" matches any name."""
    return entry.name.startswith(f".{name}") and entry.name.endswith(".tmp")


def remove_temporary_files(folder: Path, name: str) -> None:
    """Remove what killed processes left while writing the file `name`; no process may be writing it now."""
    for entry in folder.glob(".*.tmp"):
        if is_temporary_file(entry, name):
            entry.unlink()


def disk_full_error(error: BaseException) -> OSError | None:
    """Return the full disk, exceeded quota or file size limit that caused an error, None if there was none.

    Libraries raise errors of their own in place of the operating system's.
    """
    return next((e for e in exception_chain(error) if isinstance(e, OSError) and e.errno in _DISK_FULL), None)


def exception_chain(error: BaseException | None) -> list[BaseException]:
    """Return an error and the errors that it was raised from."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:  # TensorBoard raises an error from itself.
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain
