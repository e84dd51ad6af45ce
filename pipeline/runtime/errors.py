"""Which exceptions are a user's mistake or a broken environment, and the line that says so."""

import gzip
import sys
import zlib

from data_module.errors import InputError
from pipeline.runtime.atomic_file import behind, disk_full_error


def user_message(error: Exception) -> str | None:
    """The line to say of a mistake, of unreadable input, of a full disk or of a package that is not installed.

    None for an error of the program's own.
    """
    full = disk_full_error(error)
    # A full disk brings errors on errors: the line that was made first knows the most.
    lines = [str(e) for e in (behind(error) if full else (error,)) if isinstance(e, InputError)]
    if lines:
        return lines[-1]
    if full:
        return f"{full.filename or 'the output'}: {full.strerror}; make room, then run the same command again"
    if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith(("data_module", "model", "pipeline")):
        return f"{sys.executable} has no {error.name}; use .venv/bin/python, which make .venv/installed sets up"
    name = getattr(error, "filename", None)
    if isinstance(error, OSError) and name:
        return f"{name}: {error.strerror or error}; check that path, or give another"
    if isinstance(error, (gzip.BadGzipFile, EOFError, zlib.error)):
        return f"{name or 'the input'}: {error}"
    return None
