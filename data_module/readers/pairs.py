"""Read any text source as pairs of clean sentences, in chunks, with flat memory."""

import difflib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_module.errors import InputError
from data_module.readers.dataset import HubDataset
from data_module.readers.files import PairedFiles, TsvFile
from data_module.readers.reader import BYTE_ORDER_MARK, READERS, Reader, read_errors
from data_module.settings import CorpusSettings, TextSource
from data_module.tokenization.word_counts import normalize_white_space

_BUILT_IN: dict[str, type[Reader]] = {"source": PairedFiles, "tsv": TsvFile, "dataset": HubDataset}
"""Readers by the key of a text source that selects them."""


@dataclass(frozen=True)
class PairChunk:
    """Successive pairs of one source.

    White space is normalized, and a sentence of invalid UTF-8 is empty. Source sentences begin with the source's
    prefix, if it has one, except for empty ones.
    """

    name: str
    """The file or data set that line numbers refer to."""
    first_line: int
    source: list[str]
    target: list[str]
    invalid: list[int]
    """Indices into the chunk of pairs with invalid UTF-8."""


def open_reader(text: TextSource, settings: CorpusSettings) -> Reader:
    """Return the reader of a text source.

    Raises:
        InputError: no reader of that name is registered.
    """
    languages = (
        text.source_language or settings.source_language,
        text.target_language or settings.target_language,
    )
    if text.reader is None:
        return next(kind for key, kind in _BUILT_IN.items() if getattr(text, key))(text, languages)
    if text.reader not in READERS:
        nearest = difflib.get_close_matches(text.reader, READERS, n=1, cutoff=0.5)
        way_out = f"did you mean {nearest[0]!r}?" if nearest else "register it before the command starts"
        raise InputError(
            f"corpus: no reader {text.reader!r} is registered (registered: {', '.join(READERS) or 'none'}); {way_out}"
        )
    return READERS[text.reader](text, languages)


def all_available(settings: CorpusSettings) -> bool:
    """Return whether all text of a corpus can be read here: its readers are registered, and no network is needed."""
    return all(
        (text.reader is None or text.reader in READERS) and open_reader(text, settings).is_available()
        for text in settings.texts()
    )


def fingerprint(name: str, path: Path) -> dict[str, Any]:
    """Return a file's name, size in bytes and SHA-256."""
    with read_errors(name), path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"file": name, "bytes": file.tell(), "sha256": digest}


def read_pairs(text: TextSource, settings: CorpusSettings) -> Iterator[PairChunk]:
    """Read a source once, from its first pair to its last, about a megabyte at a time.

    Raises:
        InputError: see `Reader.chunks`; or a line is invalid UTF-8 and `corpus.drop_invalid_utf8` is false.
    """
    reader = open_reader(text, settings)
    first_line = 1
    for sides in reader.chunks():
        if not any(sides):
            continue
        decoded: list[list[str]] = []
        invalid: set[int] = set()
        for name, lines in zip(reader.names, sides, strict=True):
            if first_line == 1:
                lines[0] = lines[0].removeprefix(BYTE_ORDER_MARK)
            sentences, undecodable = _decode(lines)
            if len(sentences) != len(sides[0]):
                raise InputError(
                    f"{name}:{first_line}: the reader returned {len(sides[0])} source lines and {len(sentences)}"
                    r' lines that end in "\n"; correct its `chunks` (see `as_lines`)'
                )
            if undecodable and not settings.drop_invalid_utf8:
                raise invalid_utf8(name, first_line + undecodable[0])
            decoded.append(sentences)
            invalid.update(undecodable)
        if text.prefix is not None:
            decoded[0] = [f"{text.prefix} {sentence}" if sentence else "" for sentence in decoded[0]]
        yield PairChunk(reader.names[0], first_line, decoded[0], decoded[1], sorted(invalid))
        first_line += len(decoded[0])


def invalid_utf8(name: str, line: int) -> InputError:
    """Return the error for a line that is not UTF-8."""
    return InputError(
        f"{name}:{line}: invalid UTF-8; correct the line, or set `corpus.drop_invalid_utf8: true` to drop such pairs;"
        " if the whole file is Latin-1, convert it (iconv -f LATIN1 -t UTF-8)"
    )


def _decode(lines: list[bytes]) -> tuple[list[str], list[int]]:
    """Return the lines as normalized text, and the indices of those with invalid UTF-8, which are left empty."""
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
