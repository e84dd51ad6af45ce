"""Reading of text files: plain or gzip-compressed, one sentence per line, with errors in one line; progress bars.

Only "\\n" ends a line ("\\r\\n" is accepted). Other line ends of Unicode do not, so that both sides stay aligned.
"""

import gzip
import math
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BufferedReader, FileIO, RawIOBase
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, NoReturn

from data_module.errors import InputError
from data_module.system.files import OPEN_FILES, open_regular

if TYPE_CHECKING:
    from tqdm import tqdm

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
LONGEST_LINE = 16 * 2**20
"""Bytes of a line above which a file is not text in sentences; one line of a small .gz could fill the memory."""
_BLOCK_BYTES = 2**17
_FIRST_BYTES = 16
"""Length of the longest beginning in `_NOT_TEXT`, or more."""
_NOT_TEXT = {
    b"\x1f\x8b": "gzip-compressed; let its name end in .gz, or unpack it (gunzip)",
    b"BZh91AY&SY": "compressed; unpack it (bunzip2)",
    b"\xfd7zXZ\0": "compressed; unpack it (unxz)",
    b"\x28\xb5\x2f\xfd": "compressed; unpack it (unzstd)",
    b"PK\3\4": "an archive; unpack it (unzip)",
    b"\xff\xfe": "UTF-16; convert it (iconv -f UTF-16 -t UTF-8)",
    b"\xfe\xff": "UTF-16; convert it (iconv -f UTF-16 -t UTF-8)",
}
"""First bytes of a file that is not text -> what it is; the number of its lines would be meaningless."""
_ENOUGH_NULS = 16
"""This many NUL bytes, all at odd or all at even places of a block, are no coincidence."""
_MAX_NAMED_LINES = 3
SHOWN_AFTER_SECONDS = 2.0
LOG_SECONDS = 9.0
"""Seconds between lines of a progress bar in a file."""
_SHOWN_CHARACTERS = 40
"""Length of the shown part of an example of a defect: a text in another script may be one unknown piece."""


def open_file(path: str | Path) -> BufferedReader:
    """Open a regular file for reading lines of bytes; decompress it if its name ends in .gz.

    Other files, such as pipes, are read only if the path names one that is already open, such as /dev/stdin.

    Raises InputError if the file cannot be opened, is a pipe or a device, or is not text. Reading raises it if the file
    is damaged or has a line of more than `LONGEST_LINE` bytes. The message names the file.
    """
    name = str(path)
    with read_errors(name):
        file = open_regular(path)
    reader = text_reader(gzip.GzipFile(fileobj=file) if name.endswith(".gz") else file, name, file)
    try:
        if not name.startswith(OPEN_FILES):
            reader.peek(1)  # Refuses a file that is not text at once.
    except InputError:
        reader.close()
        raise
    return reader


def text_reader(file: FileIO | gzip.GzipFile, name: str, base: FileIO) -> BufferedReader:
    """Return a reader of lines of bytes from an open file, with the errors of `open_file`, which give it this name.

    `base` is the file that `file` decompresses, or `file` itself.
    """
    return BufferedReader(_CheckedBytes(file, name, base), _BLOCK_BYTES)


class _CheckedBytes(RawIOBase):
    """The bytes of a file, read block by block. Errors are those of `open_file`."""

    def __init__(self, file: FileIO | gzip.GzipFile, name: str, base: FileIO) -> None:
        self._file, self._name, self._base = file, name, base
        # Each call is one read of the operating system, so that a user who types gets an answer to each line, and text
        # before the damage of a file is read.
        self._read = file.read1 if isinstance(file, gzip.GzipFile) else file.read
        self._beginning = b""
        self._num_lines = self._unfinished = 0

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._base.fileno()

    def isatty(self) -> bool:
        return self._base.isatty()

    def close(self) -> None:
        super().close()
        self._file.close()
        self._base.close()

    def readinto(self, buffer: Any) -> int | None:
        with read_errors(self._name):
            block: bytes | None = self._read(len(buffer))
        if block is None:
            return None  # Standard input may be non-blocking.
        if len(self._beginning) < _FIRST_BYTES:
            self._beginning += block
            if kind := _no_text(self._beginning):
                raise InputError(f"{self._name}: is {kind}")
        end = block.find(b"\n")
        if self._unfinished + (len(block) if end < 0 else end) > LONGEST_LINE:
            raise InputError(
                f"{self._name}:{self._num_lines + 1}: the line has more than {LONGEST_LINE // 2**20} MB; give text with"
                " one sentence per line"
            )
        self._num_lines += block.count(b"\n")
        self._unfinished = self._unfinished + len(block) if end < 0 else len(block) - 1 - block.rfind(b"\n")
        buffer[: len(block)] = block
        return len(block)


def _no_text(beginning: bytes) -> str | None:
    """Return what a file is according to its first bytes; None if it is text."""
    for first, kind in _NOT_TEXT.items():
        if beginning.startswith(first):
            return kind
    even, odd = beginning[::2].count(0), beginning[1::2].count(0)
    half = len(beginning) // 2
    # In UTF-16 the high bytes of Latin letters are NUL, and in any language those of spaces and line ends.
    if half and (max(even, odd) >= half or (0 in (even, odd) and even + odd >= _ENOUGH_NULS)):
        return f"UTF-16 by its NUL bytes; convert it (iconv -f UTF-16{'LE' if odd >= even else 'BE'} -t UTF-8)"
    return None


def num_lines(file: BufferedReader) -> int:
    """Return the number of lines of the rest of a file, in constant memory."""
    lines, last = 0, b"\n"
    while block := file.read(_BLOCK_BYTES):
        lines, last = lines + block.count(b"\n"), block[-1:]
    return lines + (last != b"\n")


@contextmanager
def read_errors(name: str) -> Iterator[None]:
    """Convert errors from reading a file to an `InputError` that names the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise InputError(f"{name}: no such file; correct the path, relative to the working folder") from error
    except IsADirectoryError as error:
        raise InputError(f"{name}: a folder, not a file; name the text file in it") from error
    except PermissionError as error:
        raise InputError(f"{name}: permission denied; ask for read permission (chmod +r)") from error
    except (EOFError, zlib.error) as error:
        raise InputError(f"{name}: the gzip file is truncated or damaged; copy or download it again") from error
    except gzip.BadGzipFile as error:
        raise InputError(f"{name}: not a gzip file, or a damaged one; copy it again or rename it") from error
    except OSError as error:
        raise InputError(f"{name}: cannot be read: {error.strerror or error}; check the file and its disk") from error


class LineWarning:
    """Counts lines with the same defect, for one line about all of them."""

    def __init__(self, message: str, name: str = "") -> None:
        """Create a warning of a defect in a file, whose name is empty for standard input."""
        self._message = message
        self._name = name
        self._first: list[int] = []
        self._last, self._count = 0, 0

    def add(self, number: int, example: str = "") -> None:
        """Count line `number`, once if it is added several times in a row. The message quotes the first example."""
        if number == self._last:
            return
        if example and not self._count:
            self._message += f"; the first is {example[:_SHOWN_CHARACTERS]!r}"
        self._last, self._count = number, self._count + 1
        if len(self._first) < _MAX_NAMED_LINES:
            self._first.append(number)

    def text(self, unit: str = "line") -> str | None:
        """Return the number of lines, the first of them and the message; None if there are no such lines."""
        if not self._count:
            return None
        lines = f"{unit} " if self._count == 1 else f"{self._count:,} {unit}s, "
        if self._count > _MAX_NAMED_LINES:
            lines += "the first are "
        prefix = f"{self._name}: " if self._name else ""
        return f"{prefix}{lines}{', '.join(map(str, self._first))}: {self._message}"


class StrayMarks:
    """Notes on lines with bytes that are probably not part of their text, but are read unchanged."""

    def __init__(self, name: str = "") -> None:
        """Create notes on the file `name`, which is empty for standard input."""
        carriage_returns = (
            r"carriage returns inside, read as spaces; if they end lines, convert the file (tr '\r' '\n')"
        )
        byte_order_marks = r"U+FEFF inside, as from joined files; remove it (sed 's/\xEF\xBB\xBF//g')"
        self._notes = {b"\r": LineWarning(carriage_returns, name), BYTE_ORDER_MARK: LineWarning(byte_order_marks, name)}

    def add(self, first: int, lines: Sequence[bytes]) -> None:
        """Check successive lines, the first of them number `first`, without the file's own byte order mark."""
        text = b"".join(lines)
        for mark, note in self._notes.items():
            if mark in text:
                for number, line in enumerate(lines, first):
                    if mark in line.removesuffix(b"\n").removesuffix(b"\r"):
                        note.add(number)

    def texts(self) -> list[str]:
        """Return a line for each kind of mark that was found."""
        return [text for note in self._notes.values() if (text := note.text())]


@contextmanager
def progress_bar(
    description: str, total: int | None = None, *, unit: str = "sentences", show: bool = True
) -> Iterator["tqdm[NoReturn]"]:
    """Yield a tqdm bar on standard error that appears after two seconds, and then moves at least every ten seconds.

    A thread draws it, so that its time goes on even while nothing is counted. Its rate is the mean.

    Args:
        description: text in front of the bar.
        total: number of units; None if it is not known.
        unit: what the bar counts; empty to show the time alone.
        show: whether the bar is shown at all.
    """
    from tqdm import tqdm  # not for a command's help

    # A log file gets a line now and then instead of an animated bar; a notebook animates its output.
    seconds = 0.5 if sys.stderr.isatty() or "ipykernel" in sys.modules else LOG_SECONDS
    bar = tqdm(
        desc=description,
        total=total,
        unit=f" {unit}",
        bar_format=None if unit else "{desc}: {elapsed}",
        leave=None,  # below another bar, as in training, it disappears at its end
        delay=SHOWN_AFTER_SECONDS,
        mininterval=math.inf,
        disable=not show,
    )
    has_ended = Event()

    def draw() -> None:
        wait = SHOWN_AFTER_SECONDS
        while not has_ended.wait(wait):
            wait, bar.delay = seconds, 0.0  # Without a delay, its end is drawn too.
            # A full disk or a closed terminal must not end the work. tqdm itself would keep the lock after an error.
            with suppress(OSError), bar.get_lock():
                bar.refresh(nolock=True)

    thread = Thread(target=draw, daemon=True)
    if show:
        thread.start()
    try:
        yield bar
    finally:
        has_ended.set()
        if show:
            thread.join()
        with suppress(OSError):
            bar.close()
