"""Replace a folder as a whole, find out whether one can be created, and open its lock file."""

import fcntl
import os
import tempfile
from contextlib import suppress
from pathlib import Path


def replace_folder(new: Path, folder: Path, old: Path) -> None:
    """Move the folder `new` to `folder`; what was there before is moved to `old`, for the caller to remove.

    All three are on one file system. `new` is flushed to disk first, so that `folder` is complete even after a power
    failure. If the move fails, the previous folder is restored. A process killed between the two renames leaves it at
    `old`.
    """
    for path in (*new.rglob("*"), new):
        _sync(path)
    if folder.exists():
        folder.rename(old)
    try:
        new.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise
    _sync(folder.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def existing_parent(path: Path) -> Path:
    """Return the path, or the nearest parent that exists."""
    return next(parent for parent in [path, *path.absolute().parents] if parent.exists())


def write_error(folder: Path) -> str | None:
    """Return why no file can be created in a folder, or None."""
    try:
        # os.access would not do: it allows root everything.
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror


def lock_file(folder: Path) -> Path:
    """Return the name of the file that locks a folder, beside it."""
    return folder.with_name(f".{folder.name}.lock")


def take_lock(path: Path) -> tuple[int, bool]:
    """Open a lock file, which is created for all users if it is not there, and lock it unless another process has.

    Returns:
        Its descriptor, for `fcntl.flock` and `os.close`, and whether it is locked now.

    Raises:
        OSError: it cannot be created or locked, or another user has left it and keeps others from reading it.
    """
    descriptor = _open_lock(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return descriptor, False
    except OSError:
        os.close(descriptor)
        raise
    return descriptor, True


def _open_lock(path: Path) -> int:
    with suppress(FileNotFoundError):
        try:
            return os.open(path, os.O_RDWR)
        except PermissionError:
            return os.open(path, os.O_RDONLY)  # enough for a lock, but for NFS
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    with suppress(PermissionError):  # It may be another user's by now.
        os.fchmod(descriptor, 0o666)  # whatever the umask is
    return descriptor
