"""The interface of text sources, and the registry of readers that are not built in.

To add a kind of text source, subclass `Reader`, implement `chunks`, and register the class:
`READERS["jsonl"] = JSONLines`. A recipe then names it: `{reader: jsonl, path: FILE}`. See docs/extending.md.
"""

import gzip
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from data_module.errors import InputError
from data_module.settings import TextSource

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
CHUNK_BYTES = 2**20
"""Approximate size of a chunk, per side."""


class Reader(ABC):
    """Reads one text source: the sentences of both languages, in order, as bytes.

    A subclass must implement `chunks`. The other methods describe a source that is one file, `text.path`; override
    those for which this does not hold. Decoding, normalization, filtering and line numbers are not a reader's task.
    The commands create readers freely and call `chunks` several times, so a reader must return the same text each time.
    """

    def __init__(self, text: TextSource, languages: tuple[str, str]) -> None:
        """Store the source and the names of its two languages; do not open anything yet.

        Args:
            text: the source as the recipe gives it.
            languages: `source_language` and `target_language` of the source, or else of the corpus.
        """
        self.text = text
        self.languages = languages

    @abstractmethod
    def chunks(self) -> Iterator[tuple[list[bytes], list[bytes]]]:
        r"""Yield successive chunks of about `CHUNK_BYTES`: the source lines and as many target lines.

        A line is one sentence and its final "\n", which only the source's very last line may lack. It contains no
        other "\n" (see `as_lines`). It need not be valid UTF-8: the caller decodes it.

        Raises:
            InputError: the source cannot be read or has an invalid line; the message names the file and line.
        """

    @property
    def names(self) -> tuple[str, str]:
        """Names of both sides in messages, as in `train.en:7`. By default these are also the paths of the files."""
        return str(self.text.path), str(self.text.path)

    def files(self) -> dict[str, Path]:
        """Return the files to fingerprint by their names in the manifest. Remote files are downloaded first."""
        return {name: Path(name) for name in self.names}

    def is_available(self) -> bool:
        """Return whether the source can be read without a network."""
        return all(Path(name).exists() for name in self.names)

    def check(self) -> Iterator[tuple[bool, str]]:
        """Yield the results of quick checks for `doctor`: whether a check passed, and its message.

        The message of a failed check ends with what to do. No text is read, and no network is used.
        """
        for name in dict.fromkeys(self.names):
            ok = Path(name).is_file()
            yield ok, f"text {name}" + ("" if ok else " is missing; put it there or correct its path in corpus:")

    def count_pairs(self) -> int:
        """Return the number of pairs, after checking the source as far as possible without decoding it.

        Raises:
            InputError: see `chunks`; or the source is empty.
        """
        count = sum(len(source) for source, _ in self.chunks())
        if not count:
            raise InputError(f"{self.names[0]}: has no text; name a source with text")
        return count

    def hub_revisions(self) -> dict[str, str]:
        """Return the commits of the remote data sets that this source is read from, by data set name."""
        return {}


READERS: dict[str, type[Reader]] = {}
"""Registered readers by the name that a recipe gives as `reader`."""


def as_lines(sentences: Iterable[str | bytes | None]) -> list[bytes]:
    r"""Return sentences in the form that `Reader.chunks` yields. None is an empty sentence; "\n" becomes a space."""
    return [
        (text.encode() if isinstance(text, str) else text or b"").replace(b"\n", b" ") + b"\n" for text in sentences
    ]


@contextmanager
def open_file(name: str) -> Iterator[BinaryIO]:
    """Open a plain or gzip-compressed (`.gz`) file for reading, and report errors in one line that names it.

    Raises:
        InputError: the file cannot be opened, or reading it inside the `with` block fails.
    """
    with read_errors(name), _open(name) as file:
        yield file


def _open(name: str) -> BinaryIO:
    if name.endswith(".gz"):
        return BufferedReader(gzip.open(name), CHUNK_BYTES)
    return Path(name).open("rb", buffering=CHUNK_BYTES)


def num_lines(file: BinaryIO) -> int:
    """Return the number of lines of the rest of a file, in constant memory."""
    lines, last = 0, b"\n"
    while block := file.read(CHUNK_BYTES):
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
