"""Replace a folder as a whole, and find out whether one can be created."""

import os
import tempfile
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
