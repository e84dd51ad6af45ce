"""The interface of text sources, the readers of text files, and the registry of readers that are not built in.

Text is in two files of one sentence per line, or in one file of pairs; see `data_module.system.text_files`.

To add a kind of text source, subclass `Reader`, implement `chunks`, and register the class:
`READERS["jsonl"] = JSONLines`. A recipe then names it: `{reader: jsonl, path: FILE}`. See docs/extending.md.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from data_module.errors import InputError
from data_module.registry import Registry
from data_module.settings import TextSource
from data_module.system.text_files import num_lines, open_file

CHUNK_BYTES = 2**20
"""Approximate size of a chunk, per side."""


class Reader(ABC):
    """Reads one text source: the sentences of both languages, in order, as bytes.

    A subclass must implement `chunks`. The other methods describe a source that is one file, `text.path`; override
    them for any other source. Decoding, normalization, filtering and line numbers are not a reader's task.
    The commands create readers freely and call `chunks` several times, so a reader must return the same text each time.
    """

    def __init__(self, text: TextSource, languages: tuple[str, str]) -> None:
        """Store the source and the names of its two languages, its own or the corpus's; do not open anything yet."""
        self.text = text
        self.languages = languages

    @abstractmethod
    def chunks(self) -> Iterator[tuple[list[bytes], list[bytes]]]:
        r"""Yield successive chunks of about `CHUNK_BYTES`: the source lines and as many target lines.

        A line is one sentence and its final "\n", which only the source's very last line may lack. It contains no
        other "\n" (see `as_lines`). It need not be valid UTF-8: the caller decodes it.

        Raises InputError if the source cannot be read or has an invalid line; the message names the file and line.
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
            problem = "is no file" if Path(name).exists() else "is missing"
            yield ok, f"text {name}" + ("" if ok else f" {problem}; put it there or correct its path in corpus:")

    def hub_revisions(self) -> dict[str, str]:
        """Return the commits of the remote data sets that this source is read from, by data set name."""
        return {}


READERS: Registry[type[Reader]] = Registry("corpus: reader")
"""Registered readers by the name that a recipe gives as `reader`."""


def as_lines(sentences: Iterable[str | bytes | None]) -> list[bytes]:
    r"""Return sentences in the form that `Reader.chunks` yields. None is an empty sentence; "\n" becomes a space."""
    return [
        (text.encode() if isinstance(text, str) else text or b"").replace(b"\n", b" ") + b"\n" for text in sentences
    ]


class PairedFiles(Reader):
    """Two files, `source` and `target`: line i of one translates to line i of the other."""

    @property
    def names(self) -> tuple[str, str]:
        """The paths of both files."""
        return str(self.text.source), str(self.text.target)

    def chunks(self) -> Iterator[tuple[list[bytes], list[bytes]]]:
        """Yield the lines of both files, which must be different files with equally many lines."""
        source, target = self.names
        num_lines_before = 0
        with open_file(source) as source_file, open_file(target) as target_file:
            if os.path.sameopenfile(source_file.fileno(), target_file.fileno()):
                raise InputError(f"{source}: source and target are the same file; name the other language's as target")
            while True:
                source_lines = source_file.readlines(CHUNK_BYTES)
                # At the end of the source, one more target line shows that the target is longer.
                target_lines = list(islice(target_file, len(source_lines) or 1))
                if len(source_lines) != len(target_lines):
                    num_target = num_lines_before + len(target_lines) + num_lines(target_file)
                    num_source = num_lines_before + len(source_lines) + num_lines(source_file)
                    short, long = sorted([(num_source, source), (num_target, target)])
                    raise InputError(
                        f"{short[1]}: {short[0]} lines, but {long[1]} has {long[0]}: line i of one file"
                        " must translate line i of the other; restore the missing lines"
                    )
                if not source_lines:
                    return
                yield source_lines, target_lines
                num_lines_before += len(source_lines)


class TsvFile(Reader):
    """One file, `tsv`, of two tab-separated columns: source and target."""

    @property
    def names(self) -> tuple[str, str]:
        """The path of the file, for both sides."""
        return str(self.text.tsv), str(self.text.tsv)

    def chunks(self) -> Iterator[tuple[list[bytes], list[bytes]]]:
        """Yield the columns of the lines, which must have exactly two."""
        name, first_line = self.names[0], 1
        with open_file(name) as file:
            while lines := file.readlines(CHUNK_BYTES):
                rows = [line.split(b"\t") for line in lines]
                for i, row in enumerate(rows):
                    if len(row) != 2:
                        columns = f"{len(row)} tab-separated column{'s' if len(row) > 1 else ''}"
                        cut = ", or change all lines: cut -f1,2 drops other columns, sed 's/\\t/ /' joins the first two"
                        cut = cut if len(row) > 2 else ""
                        raise InputError(f"{name}:{first_line + i}: {columns}, not two; correct the line{cut}")
                yield [row[0] + b"\n" for row in rows], [row[1] for row in rows]
                first_line += len(lines)
