"""Errors caused by the user, reported in one line, and the commands that such lines name."""

import importlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

IN_CLONE = (Path(__file__).resolve().parent.parent / "constraints.txt").is_file()
"""Whether the program runs from a clone, not from an installed wheel."""
PROGRAM = "attention-pipeline" if Path(sys.argv[0]).stem == "attention-pipeline" else "python -m pipeline"
"""What the user typed before the command."""
SCRIPTS = ".venv/bin/" if IN_CLONE else ""
"""What to type before programs of other packages, such as TensorBoard."""


_ESCAPES = {code: repr(chr(code))[1:-1] for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) != "\t"}


def printable(text: str) -> str:
    """Return the text with control characters escaped: in a quoted value, they could change the user's terminal."""
    return text.translate(_ESCAPES)


class InputError(Exception):
    """An error in the user's input.

    The message is one line that names the file, line or key, and what to do. The commands print it without
    a traceback and exit with code 2.
    """

    def __str__(self) -> str:
        """Return the message with its control characters escaped."""
        return printable(super().__str__())


def first_of(parts: Sequence[object], most: int = 3, separator: str = "; ", total: int = 0) -> str:
    """Return the first parts of a message, and the number of the others; `total` is the number of parts if higher."""
    shown = [*map(str, parts[:most])]
    more = max(total, len(parts)) - len(shown)
    return separator.join([*shown, *([f"and {more:,} more"] if more > 0 else [])])


def install(extra: str) -> str:
    """Return the command that installs the packages of one of pyproject.toml's extras."""
    if IN_CLONE:
        return f".venv/bin/pip install -c constraints.txt -e '.[{extra}]'"  # as in docs/getting-started.md
    from importlib.metadata import requires  # which every command would import

    needs = (requirement.partition(";") for requirement in requires("attention-pipeline") or [])
    packages = [
        f"'{package.strip()}'" for package, _, when in needs if re.search(rf"""extra == ["']{extra}["']""", when)
    ]
    return f"{sys.executable} -m pip install {' '.join(packages)}"


def require_package(name: str, extra: str) -> ModuleType:
    """Return a package of one of pyproject.toml's extras; raise InputError if it cannot be imported."""
    try:
        # By name, because type checking some of the packages takes minutes.
        return importlib.import_module(name)
    except ImportError as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name in (name, name.partition(".")[0])
        problem = "is not installed" if is_missing else f"cannot be imported ({error})"
        raise InputError(f"{name} {problem}; run: {install(extra)}") from None
