r"""Raw parallel text of every kind, read in chunks, in flat memory: plain, gzip-compressed, tab-separated, data sets.

Only "\n" ends a line ("\r\n" is accepted), whatever else Unicode calls a line end: the sides stay aligned.
"""

import gzip
import hashlib
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from data_module.errors import InputError
from data_module.readers.dataset_sources import split_files, split_lines, split_name
from data_module.settings import CorpusSettings, TextSource
from data_module.tokenization.word_counts import normalize_white_space

_CHUNK_BYTES = 2**20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_NOT_TEXT = {
    b"\x1f\x8b": "gzip-compressed; let its name end in .gz",
    b"BZh": "compressed; unpack it (bunzip2)",
    b"\xfd7zXZ\0": "compressed; unpack it (unxz)",
    b"\x28\xb5\x2f\xfd": "compressed; unpack it (unzstd)",
    b"\xff\xfe": "UTF-16; convert it (iconv -f UTF-16 -t UTF-8)",
    b"\xfe\xff": "UTF-16; convert it (iconv -f UTF-16 -t UTF-8)",
}
"""By a file's first bytes; lines counted in one of these would mean nothing."""


@dataclass(frozen=True)
class PairChunk:
    """Successive pairs of one source, their white space normalized; an unreadable line is an empty one."""

    name: str
    """The file or data set that line numbers refer to."""
    first_line: int
    source: list[str]
    target: list[str]
    invalid: list[int]
    """Which pairs, counted from the chunk's first, have invalid UTF-8."""


def files_of(text: TextSource) -> dict[str, Path]:
    """Return the files that a source is read from, each by the name that the manifest gives it.

    Those of a data set on the hub are downloaded first.
    """
    return split_files(text) if text.dataset else {name: Path(name) for name in _names(text)}


def is_available(text: TextSource) -> bool:
    """Return whether a source lies on this machine; looks nothing up on the hub."""
    return all(Path(name).exists() for name in _names(text))


def fingerprint(name: str, path: Path) -> dict[str, Any]:
    """Return a file's name, size in bytes and SHA-256."""
    with _reading(name), path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"file": name, "bytes": file.tell(), "sha256": digest}


def count_pairs(text: TextSource, settings: CorpusSettings) -> int:
    """Return the pairs of one reading of a source.

    Raises:
        InputError: a file is missing, unreadable, empty or truncated; the sides are of unequal length or the
            same file; a data set has no such languages.
    """
    if text.dataset:
        return sum(len(source) for source, _ in _chunks(text, settings))
    names = _names(text)
    if len(names) == 2 and _same_file(*names):
        raise InputError(f"{names[0]}: source and target are the same file; name the other language's as target")
    counts = [_count_lines(name) for name in names]
    if counts[0] != counts[-1]:
        short, long = sorted(zip(counts, names, strict=True))
        raise InputError(
            f"{short[1]}: {short[0]} lines, but {long[1]} has {long[0]}: it is shorter, and line i must pair"
            " with line i; restore the missing lines"
        )
    return counts[0]


def read_pairs(text: TextSource, settings: CorpusSettings) -> Iterator[PairChunk]:
    """Read a source once, from its first pair to its last, about a megabyte at a time.

    Raises:
        InputError: a file cannot be read, a tab-separated line has not two columns, or a line is not UTF-8
            and `corpus.drop_invalid_utf8` is false.
    """
    names = [split_name(text)] if text.dataset else _names(text)
    first_line = 1
    for sides in _chunks(text, settings):
        decoded: list[list[str]] = []
        invalid: set[int] = set()
        for name, lines in zip((names[0], names[-1]), sides, strict=True):
            if first_line == 1:
                lines[0] = lines[0].removeprefix(_BYTE_ORDER_MARK)
            sentences, undecodable = _decode(lines)
            if undecodable and not settings.drop_invalid_utf8:
                raise InputError(
                    f"{name}:{first_line + undecodable[0]}: invalid UTF-8; mend the line, or set"
                    " `corpus.drop_invalid_utf8: true` to drop such pairs; if all the file is Latin-1, convert it"
                    " (iconv -f LATIN1 -t UTF-8)"
                )
            decoded.append(sentences)
            invalid.update(undecodable)
        yield PairChunk(names[0], first_line, decoded[0], decoded[1], sorted(invalid))
        first_line += len(decoded[0])


def _names(text: TextSource) -> list[str]:
    """Return what the recipe names: one or two files, or a data set."""
    return [name for name in (text.source, text.target, text.tsv, text.dataset) if name]


def _chunks(text: TextSource, settings: CorpusSettings) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """Yield successive lines of both sides."""
    if text.dataset:
        return split_lines(text, (settings.source_language, settings.target_language))
    names = _names(text)
    return _aligned_chunks(*names) if len(names) == 2 else _tsv_chunks(*names)


def _aligned_chunks(source: str, target: str) -> Iterator[tuple[list[bytes], list[bytes]]]:
    with _reading(source), _open(source) as source_file, _reading(target), _open(target) as target_file:
        while True:
            with _reading(source):
                source_lines = source_file.readlines(_CHUNK_BYTES)
            target_lines = list(islice(target_file, len(source_lines)))
            if len(source_lines) != len(target_lines):
                raise InputError(f"{target}: became shorter while it was read; run prepare again")
            if not source_lines:
                return
            yield source_lines, target_lines


def _tsv_chunks(name: str) -> Iterator[tuple[list[bytes], list[bytes]]]:
    first_line = 1
    with _reading(name), _open(name) as file:
        while lines := file.readlines(_CHUNK_BYTES):
            rows = [line.split(b"\t") for line in lines]
            for i, row in enumerate(rows):
                if len(row) != 2:
                    columns = f"{len(row)} tab-separated column{'s' if len(row) > 1 else ''}"
                    cut = ", or take two of all (cut -f1,2)" if len(row) > 2 else ""
                    raise InputError(f"{name}:{first_line + i}: {columns}, not two; mend the line{cut}")
            yield [row[0] + b"\n" for row in rows], [row[1] for row in rows]
            first_line += len(lines)


def _decode(lines: list[bytes]) -> tuple[list[str], list[int]]:
    """Return the lines as clean text, and which of them are not UTF-8 (left empty)."""
    invalid = []
    try:
        text = b"".join(lines).decode()
    except UnicodeDecodeError:
        decoded = []
        for i, line in enumerate(lines):
            try:
                decoded.append(line.decode())
            except UnicodeDecodeError:
                decoded.append("\n")
                invalid.append(i)
        text = "".join(decoded)
    return normalize_white_space(text.removesuffix("\n")).split("\n"), invalid


def _count_lines(name: str) -> int:
    lines, last = 0, b"\n"
    with _reading(name), _open(name) as file:
        for beginning, what in _NOT_TEXT.items():
            if file.peek(len(beginning)).startswith(beginning):  # type: ignore[attr-defined]
                raise InputError(f"{name}: is {what}")
        while block := file.read(_CHUNK_BYTES):
            lines += block.count(b"\n")
            last = block[-1:]
    lines += last != b"\n"
    if not lines:
        raise InputError(f"{name}: the file is empty; name one with text")
    return lines


def _open(name: str) -> BinaryIO:
    if name.endswith(".gz"):
        return BufferedReader(gzip.open(name), _CHUNK_BYTES)
    return Path(name).open("rb", buffering=_CHUNK_BYTES)


def _same_file(source: str, target: str) -> bool:
    with _reading(source):
        Path(source).stat()
    with _reading(target):
        return Path(source).samefile(target)


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Turn what can go wrong with a file into one line that names it."""
    try:
        yield
    except FileNotFoundError as error:
        raise InputError(f"{name}: no such file; correct the path, relative to the working folder") from error
    except IsADirectoryError as error:
        raise InputError(f"{name}: a folder, not a file; name the text file in it") from error
    except PermissionError as error:
        raise InputError(f"{name}: may not be read; ask for read permission (chmod +r)") from error
    except (EOFError, zlib.error) as error:
        raise InputError(f"{name}: the gzip file is truncated or damaged; copy or download it again") from error
    except gzip.BadGzipFile as error:
        raise InputError(f"{name}: not a gzip file, or a damaged one; copy it again or rename it") from error
    except OSError as error:
        raise InputError(f"{name}: cannot be read: {error.strerror or error}") from error
