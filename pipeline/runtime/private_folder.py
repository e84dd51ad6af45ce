"""The folder for compiled code, into which no other user can put any."""

import os
import tempfile
from pathlib import Path

from pipeline.runtime.console import say


def compiled_code_folder() -> Path:
    """Return `attention-pipeline/compiled` in XDG_CACHE_HOME, or else in ~/.cache, and create it if necessary.

    If other users could put code into it or it cannot be written, a folder of this machine replaces it, which is
    reported.

    Raises:
        OSError: that folder is not safe either.
    """
    kept = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "attention-pipeline", "compiled")
    try:
        return _private(kept)
    except (OSError, RuntimeError) as error:
        temporary = Path(tempfile.gettempdir(), f"attention-pipeline-{os.geteuid()}")
        try:
            folder = _private(temporary)
        except OSError as other:
            raise OSError(
                f"compiled code cannot be kept in {kept} ({_reason(error)}), nor in {temporary} ({_reason(other)})"
            ) from None
        say(f"compiled code is kept in {temporary} instead of {kept}: {_reason(error)}")
        return folder


def _private(path: Path) -> Path:
    """Create a folder, unless it exists, and return its path without links.

    Raises OSError if it cannot be written, or if another user could put code into it, and RuntimeError without a home.
    """
    folder = path.expanduser().resolve()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.geteuid():
        raise PermissionError("it belongs to another user")
    if found.st_mode & 0o022:
        raise PermissionError("other users can write to it")
    tempfile.TemporaryFile(dir=folder).close()
    return folder


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
