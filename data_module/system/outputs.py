"""What a user names as output: it is compared with what a command reads, and opened.

Files are compared, not their names, so that links, hard links and other spellings of a path count.
"""

import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from data_module.errors import InputError
from data_module.system.files import atomic_file, naming_full_disk, replace_error

_OPEN_FILE = re.compile(r"/dev/std(out|err)|/(?:dev|proc/self)/fd/(\d+)")
"""A path of a file that is open already, such as one to which standard output was redirected."""


def check_outputs(outputs: Iterable[tuple[str, Path]], inputs: Iterable[Path]) -> None:
    """Raise InputError if a command would write over a file that it reads, or over another of its outputs.

    Standard output and standard error are outputs too. Pipes and devices are not compared.

    Args:
        outputs: files and folders, which need not exist, each with the option or key that names it.
        inputs: files that the command reads, if they exist. A folder that is an output may hold none.
    """
    read = {identity: file for file in inputs if isinstance(identity := _identity(file), tuple)}
    written: dict[object, str] = {}
    for name, stream in (("standard output", sys.stdout), ("standard error", sys.stderr)):
        with suppress(AttributeError, OSError, ValueError):  # There is no stream, or no file below it.
            written[_identity(Path(f"/dev/fd/{stream.fileno()}"))] = name
    for found in filter(written.get, read):
        raise InputError(f"{read[found]}: is read, and {written[found]} goes to it; redirect that to another file")
    for option, path in outputs:
        identity, target = _identity(path), followed(path)
        if target.is_symlink():
            raise InputError(f"{path}: is a link that leads to itself; give another {option}")
        if identity in read:
            raise InputError(f"{path}: is read by this command, and would be overwritten; give another {option}")
        if inside := next((file for file in read.values() if target in followed(file).parents), None):
            raise InputError(f"{inside}: is read by this command, and {path} would be replaced; give another {option}")
        if _OPEN_FILE.fullmatch(str(path)) or identity is None:
            continue
        if identity in written:
            raise InputError(f"{path}: is {written[identity]} too; give another {option}")
        written[identity] = option


def _identity(path: Path) -> tuple[int, int] | str | None:
    """Return what all names of a file or folder have in common: if it does not exist, its path without links.

    None for a pipe or a device, which may be named several times.
    """
    try:
        status = path.stat()
    except OSError:
        return os.path.realpath(path)
    is_compared = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
    return (status.st_dev, status.st_ino) if is_compared else None


def require_writable(path: Path, option: str) -> None:
    """Raise InputError if a file cannot be written, before its contents are computed; `option` names it."""
    if not followed(path).parent.is_dir():
        raise InputError(f"{path}: its folder does not exist; create it or give another {option}")
    if path.is_dir():
        raise InputError(f"{path}: is a folder; give a file as {option}")
    if not os.access(path if path.exists() else followed(path).parent, os.W_OK):
        raise InputError(f"{path}: cannot be written; change its permissions or give another {option}")


def followed(path: Path) -> Path:
    """Return the file that a path leads to by links, which need not exist; a link that leads to itself stays one.

    A file that a user names by an option is written there. Names that the program makes itself are not followed: see
    `atomic_file`.
    """
    return Path(os.path.realpath(path))


@contextmanager
def output_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that is written as a whole, or in place if that is impossible, as for a pipe; links are followed."""
    if is_open := _OPEN_FILE.fullmatch(str(path)):
        # Opened again by its path, it would be written from its beginning, over what has been printed.
        sys.stdout.flush()
        number = int(is_open[2] or ("out", "err").index(is_open[1]) + 1)
        with naming_full_disk(path), os.fdopen(os.dup(number), "wb") as file:
            yield file
    elif (path.exists() and not path.is_file()) or replace_error(followed(path)):
        with naming_full_disk(path), path.open("wb") as file:
            yield file
    else:
        with atomic_file(followed(path)) as file:
            yield file


def require_own(folder: Path, names: re.Pattern[str], way_out: str) -> None:
    """Raise InputError if a folder that is to be replaced holds what this program has not made.

    `names` is a pattern of the paths in the folder that the program makes.
    """
    for entry in sorted(folder.rglob("*")):
        if not names.fullmatch(entry.relative_to(folder).as_posix()):
            raise InputError(
                f"{entry}: was not made by this program, and {folder} would be replaced with all that it holds; move it"
                f" away, or {way_out}"
            )


def files_of_texts(corpus: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the files of a recipe's texts and of its tokenizer, from the section `corpus` as plain values."""
    for split in ("train", "validation", "test"):
        for text in corpus.get(split) or ():
            for path in (Path(text[key]) for key in ("source", "target", "tsv", "path", "dataset") if text.get(key)):
                yield from path.rglob("*") if path.is_dir() else [path]
    if corpus.get("tokenizer"):
        path = Path(corpus["tokenizer"])
        yield from path.glob("*.model") if path.is_dir() else [path]
