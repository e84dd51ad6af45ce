"""Text files and streams of sentences, read line by line; the progress bar of a translation."""

import gzip
import sys
import zlib
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from pipeline.inference.translator import Translation, Translator

CHUNK = 512
"""Lines translated together: enough for batches of like length, few enough for flat memory and a moving bar."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def translated(translator: "Translator", lines: Iterable[str], chunk: int, n_best: int = 1) -> Iterator["Translation"]:
    """Translations in order, a chunk of lines at a time, with a progress bar after two seconds of work."""
    from tqdm import tqdm

    lines = iter(lines)
    # A log gets a line every half minute instead of a bar.
    interval = 0.1 if sys.stderr.isatty() else 30.0
    with tqdm(desc="translating", unit=" sentences", delay=2, mininterval=interval, disable=chunk == 1) as bar:
        while batch := list(islice(lines, chunk)):
            yield from translator.translate(batch, n_best)
            bar.update(len(batch))


def warn(number: int, message: str, name: str = "") -> None:
    """Say on standard error what is the matter with a line, of a file if there are several."""
    from tqdm import tqdm

    tqdm.write(f"{name}{':' if name else 'line '}{number}: {message}", file=sys.stderr)


def open_text(path: Path) -> BinaryIO:
    """A file to read lines from, decompressed if it ends in .gz.

    Raises InputError when it cannot be opened.
    """
    from data_module.errors import InputError

    try:
        path.open("rb").close()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); give a text file") from None
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def sentences(stream: BinaryIO, name: str = "") -> Iterator[str]:
    """Lines as text. Only a line feed ends one; what is no UTF-8 is replaced, and warned of.

    Raises InputError where a compressed file is damaged.
    """
    for number, line in enumerate(_whole_lines(stream, name), 1):
        line = line.removesuffix(b"\n").removesuffix(b"\r")
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        try:
            yield line.decode()
        except UnicodeDecodeError:
            warn(number, "is not valid UTF-8; what could not be read was replaced", name)
            yield line.decode(errors="replace")


def _whole_lines(stream: BinaryIO, name: str) -> Iterator[bytes]:
    from data_module.errors import InputError

    try:
        yield from stream
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        what = name or getattr(stream, "name", "the input")
        raise InputError(f"{what}: is no gzip file or a damaged one ({error}); copy it again or rename it") from None


def read_sentences(path: Path) -> list[str]:
    """All lines of a file; raises InputError when it cannot be read."""
    with open_text(path) as stream:
        return list(sentences(stream, str(path)))


def paired_texts(source: Path, reference: Path) -> tuple[list[str], list[str]]:
    """The lines of both; raises InputError where they cannot be read, do not pair up or are none."""
    from data_module.errors import InputError

    sources, references = read_sentences(source), read_sentences(reference)
    if len(sources) != len(references):
        shorter = source if len(sources) < len(references) else reference
        raise InputError(
            f"{source} has {len(sources)} lines and {reference} {len(references)}; "
            f"{shorter} is shorter: give texts whose lines pair up"
        )
    if not sources:
        raise InputError(f"{source}: is empty; there is nothing to score")
    return sources, references
