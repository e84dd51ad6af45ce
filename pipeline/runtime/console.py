"""The program's output: messages on standard error, mistakes in one line, warnings to hide, and UTF-8 streams."""

import codecs
import locale
import logging
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import Any

from data_module.errors import IN_CLONE, InputError, printable
from data_module.system.files import disk_full_error, exception_chain
from pipeline.runtime.launch import process_rank

_LIGHTNING_LOGGERS = (
    # Lightning sets the level of its two packages when it is imported, which may be later.
    "lightning.pytorch",
    "lightning.fabric",
    "lightning.pytorch.accelerators.cuda",
    "lightning.pytorch.utilities.rank_zero",
    "lightning.fabric.utilities.distributed",
    "lightning.pytorch.profilers",
)

_UTF8_MODE = "PYTHONUTF8"


def quiet_lightning() -> None:
    """Hide Lightning's start-up messages, and warnings that do not apply to this program."""
    for name in _LIGHTNING_LOGGERS:
        # The report of `trainer.profiler` is a message of its logger.
        level = logging.INFO if name.endswith("profilers") else logging.WARNING
        logging.getLogger(name).setLevel(level)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    # The amount of work does not depend on the number of workers, which sleep most of the time.
    warnings.filterwarnings("ignore", ".*This DataLoader will create .* worker processes.*")
    warnings.filterwarnings("ignore", ".*treespec, LeafSpec.*")
    warnings.filterwarnings("ignore", ".*`srun` command is available.*")
    # run.patience may be removed on resume, and with it the callback whose state is in the checkpoint.
    warnings.filterwarnings("ignore", ".*callbacks used to create the checkpoint need to be provided.*")
    warnings.filterwarnings("ignore", ".*failed to export trace as `dirpath` is None.*")  # No recipe key sets it.
    # Scores are summed over ranks before they are logged.
    warnings.filterwarnings("ignore", ".*recommended to use .*sync_dist=True.*")


@contextmanager
def lightning_noise_restored() -> Iterator[None]:
    """Undo `quiet_lightning` at the end, for a process that does not belong to this program alone."""
    levels = {name: logging.getLogger(name).level for name in _LIGHTNING_LOGGERS}
    try:
        with warnings.catch_warnings():
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


class ReaderGone(Exception):
    """The program that reads standard output has ended, as `head` does."""


class _Stream(FileIO):
    """A standard stream. If the program that reads it has ended, what is written is dropped.

    Libraries write progress bars, warnings and log lines too. None of these may end the command's work, nor change its
    exit code when Python flushes the stream, so standard error drops whatever cannot be written: on a full disk, or
    when its terminal is closed.
    """

    is_product, is_error = False, False
    """Whether the command only prints, so that ReaderGone is raised; and whether this is standard error."""

    def write(self, data: Any, /) -> int:
        """Write to the stream, or drop the data."""
        try:
            return super().write(data)
        except OSError as error:
            if self.is_error:
                return len(data)
            if not isinstance(error, ConnectionError):
                raise
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fileno())
        os.close(null)
        if self.is_product:
            raise ReaderGone
        return super().write(data)


def drop_unread_output(is_product: bool = False) -> None:
    """From now on, drop what is written to standard output and standard error while nothing reads them (`| head`).

    With `is_product`, standard output raises ReaderGone once, so that nothing is computed for nobody.
    """
    for name in ("stdout", "stderr"):
        before = getattr(sys, name)
        if isinstance(before, TextIOWrapper):  # A notebook has streams of another kind.
            stream = _Stream(before.fileno(), "w", closefd=False)
            stream.is_product, stream.is_error = is_product and name == "stdout", name == "stderr"
            # Python run with -u does not buffer either.
            buffer = stream if isinstance(before.buffer, FileIO) else BufferedWriter(stream)
            how = before.encoding, before.errors, None, before.line_buffering, before.write_through
            setattr(sys, name, TextIOWrapper(buffer, *how))


def report(line: object) -> None:
    """Print one line on standard error, in a terminal above the progress bars.

    Every message goes through this function: names of files may hold control characters, and standard error may be a
    file on a full disk.
    """
    message = printable(str(line))
    with suppress(OSError):
        if sys.stderr.isatty() and "tqdm" in sys.modules:
            from tqdm import tqdm  # This module is imported before missing packages are reported.

            tqdm.write(message, file=sys.stderr)
        else:  # tqdm would print every bar again, even one that has not begun.
            print(message, file=sys.stderr, flush=True)


def say(message: str) -> None:
    """Report one line, on rank 0 only."""
    if process_rank() == 0:
        report(message)


class MessageFormatter(logging.Formatter):
    """Formats the message of a log as `report` prints one."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the message without control characters."""
        return printable(super().formatMessage(record))


class Failure(Exception):
    """What ends a command without a mistake of the user; it is reported in one line, with exit code 1.

    The same start may succeed later.
    """


class RendezvousError(Failure):
    """Ranks could not connect to one another."""


class UnusableAddressError(RendezvousError):
    """The address or port given for rank 0 cannot be used; the next start would fail as well."""


def user_message(error: Exception) -> str | None:
    """Return the line to print for a user's mistake, unreadable input, a full disk or a missing package.

    Return None for a bug in the program.
    """
    full = disk_full_error(error)
    # A full disk causes further errors; the first message names the file.
    lines = [str(e) for e in (exception_chain(error) if full else (error,)) if isinstance(e, InputError)]
    if lines:
        return lines[-1]
    if full:
        unnamed = f"standard output or error, or a file in {tempfile.gettempdir()} or a cache of compiled code"
        return f"{full.filename or unnamed}: {full.strerror}; make room, then run the same command again"
    if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith(("data_module", "model", "pipeline")):
        clone, wheel = "use .venv/bin/python, which make .venv/installed sets up", "install the wheel with its packages"
        return f"{sys.executable} has no {error.name}; {clone if IN_CLONE else wheel}"
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror or error}; check that path, or give another"
    return None


def lacking_memory(error: BaseException) -> str | None:
    """Return the message of an out-of-memory error in one line; None for another error."""
    text = " ".join(str(error).split())
    # PyTorch has a class for this error only on GPUs.
    if not isinstance(error, MemoryError) and not re.search("(can't|Cannot) allocate memory|out of memory", text):
        return None
    return text[max(0, text.find("DefaultCPUAllocator")) :][:200] or type(error).__name__


def open_closed_streams() -> None:
    """Open the null device in place of each standard stream that is closed, as by `2>&-`.

    Python sets it to None, and `print(..., file=None)` would write messages to standard output, among translations.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # It gets the number of the closed one.
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8", closefd=False))


def use_utf8() -> None:
    """Restart this process in Python's UTF-8 mode if the locale or PYTHONIOENCODING has another encoding.

    Python reads both only when it starts. The processes that this one starts inherit the mode. A file name that is not
    UTF-8 is printed as its bytes.
    """
    streams = [stream.encoding for stream in (sys.stdin, sys.stdout, sys.stderr)]
    names = [sys.getfilesystemencoding(), locale.getpreferredencoding(False), *streams]
    if all(codecs.lookup(name).name == "utf-8" for name in names) or os.environ.get(_UTF8_MODE) == "1":
        return
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONIOENCODING"}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**environment, _UTF8_MODE: "1"})
