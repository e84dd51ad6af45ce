"""Errors that are reported as one line instead of a traceback."""

import gzip
import sys
import zlib

from data_module.errors import IN_CLONE, InputError
from data_module.files import disk_full_error, exception_chain


class RendezvousError(Exception):
    """Ranks could not connect to one another: one line, as for a mistake, but the same start may succeed later."""


def user_message(error: Exception) -> str | None:
    """Return the line to print for a user's mistake, unreadable input, a full disk or a missing package.

    None for a bug in the program.
    """
    full = disk_full_error(error)
    # A full disk causes further errors; the first message names the file.
    lines = [str(e) for e in (exception_chain(error) if full else (error,)) if isinstance(e, InputError)]
    if lines:
        return lines[-1]
    if full:
        return f"{full.filename or 'the output'}: {full.strerror}; make room, then run the same command again"
    if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith(("data_module", "model", "pipeline")):
        clone, wheel = "use .venv/bin/python, which make .venv/installed sets up", "install the wheel with its packages"
        return f"{sys.executable} has no {error.name}; {clone if IN_CLONE else wheel}"
    name = getattr(error, "filename", None)
    if isinstance(error, OSError) and name:
        return f"{name}: {error.strerror or error}; check that path, or give another"
    if isinstance(error, (gzip.BadGzipFile, EOFError, zlib.error)):
        return f"{name or 'the input'}: {error}; copy it again"
    return None
