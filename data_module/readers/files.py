r"""Readers of text files, plain or gzip-compressed: two files of one sentence per line, or one file of pairs.

Only "\n" ends a line ("\r\n" is accepted). Other line ends of Unicode do not, so that both sides stay aligned.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from data_module.errors import InputError
from data_module.readers import reader
from data_module.readers.reader import Reader, open_file, read_errors

_NOT_TEXT = {
    b"\x1f\x8b": "gzip-compressed; let its name end in .gz",
    b"BZh": "compressed; unpack it (bunzip2)",
    b"\xfd7zXZ\0": "compressed; unpack it (unxz)",
    b"\x28\xb5\x2f\xfd": "compressed; unpack it (unzstd)",
    b"\xff\xfe": "UTF-16; convert it (iconv -f UTF-16 -t UTF-8)",
    b"\xfe\xff": "UTF-16; convert it (iconv -f UTF-16 -t UTF-8)",
}
"""What a file is by its first bytes, if it is no text; the number of its lines would be meaningless."""


class PairedFiles(Reader):
    """Two files, `source` and `target`: line i of one translates to line i of the other."""

    @property
    def names(self) -> tuple[str, str]:
        """The paths of both files."""
        return str(self.text.source), str(self.text.target)

    def count_pairs(self) -> int:
        """Count the lines of both files; they must be different files with equally many lines."""
        source, target = self.names
        if _is_same_file(source, target):
            raise InputError(f"{source}: source and target are the same file; name the other language's as target")
        counts = [_count_lines(name) for name in self.names]
        if counts[0] != counts[1]:
            short, long = sorted(zip(counts, self.names, strict=True))
            raise InputError(
                f"{short[1]}: {short[0]} lines, but {long[1]} has {long[0]}: it is shorter, and line i must pair"
                " with line i; restore the missing lines"
            )
        return counts[0]

    def chunks(self) -> Iterator[tuple[list[bytes], list[bytes]]]:
        """Yield the lines of both files."""
        source, target = self.names
        with open_file(source) as source_file, open_file(target) as target_file:
            while True:
                with read_errors(source):
                    source_lines = source_file.readlines(reader.CHUNK_BYTES)
                target_lines = list(islice(target_file, len(source_lines)))
                if len(source_lines) != len(target_lines):
                    raise InputError(f"{target}: became shorter while it was read; run prepare again")
                if not source_lines:
                    return
                yield source_lines, target_lines


class TsvFile(Reader):
    """One file, `tsv`, of two tab-separated columns: source and target."""

    @property
    def names(self) -> tuple[str, str]:
        """The path of the file, for both sides."""
        return str(self.text.tsv), str(self.text.tsv)

    def count_pairs(self) -> int:
        """Count the lines; `chunks` checks the columns."""
        return _count_lines(self.names[0])

    def chunks(self) -> Iterator[tuple[list[bytes], list[bytes]]]:
        """Yield the columns of the lines, which must have exactly two."""
        name, first_line = self.names[0], 1
        with open_file(name) as file:
            while lines := file.readlines(reader.CHUNK_BYTES):
                rows = [line.split(b"\t") for line in lines]
                for i, row in enumerate(rows):
                    if len(row) != 2:
                        columns = f"{len(row)} tab-separated column{'s' if len(row) > 1 else ''}"
                        cut = ", or keep two columns of every line (cut -f1,2)" if len(row) > 2 else ""
                        raise InputError(f"{name}:{first_line + i}: {columns}, not two; correct the line{cut}")
                yield [row[0] + b"\n" for row in rows], [row[1] for row in rows]
                first_line += len(lines)


def _count_lines(name: str) -> int:
    with open_file(name) as file:
        for beginning, kind in _NOT_TEXT.items():
            if file.peek(len(beginning)).startswith(beginning):  # type: ignore[attr-defined]
                raise InputError(f"{name}: is {kind}")
        lines = reader.num_lines(file)
    if not lines:
        raise InputError(f"{name}: the file is empty; name one with text")
    return lines


def _is_same_file(source: str, target: str) -> bool:
    with read_errors(source):
        Path(source).stat()
    with read_errors(target):
        return Path(source).samefile(target)
