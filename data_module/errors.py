"""Errors caused by the user, reported in one line, and the commands that such lines name."""

import re
import sys
from pathlib import Path

IN_CLONE = (Path(__file__).resolve().parent.parent / "constraints.txt").is_file()
"""Whether the program runs from a clone, not from an installed wheel."""
PROGRAM = "attention-pipeline" if Path(sys.argv[0]).stem == "attention-pipeline" else "python -m pipeline"
"""What the user has typed before the command."""
SCRIPTS = ".venv/bin/" if IN_CLONE else ""
"""What to type before programs of other packages, such as TensorBoard."""


class InputError(Exception):
    """An error in the user's input.

    The message is one line that names the file, line or key, and what to do. The commands print it without
    a traceback and exit with code 2.
    """

    def __init__(self, message: str) -> None:
        """Store the message, with its line breaks escaped, such as those of a quoted key."""
        super().__init__(message.replace("\r", "\\r").replace("\n", "\\n"))


def install(extra: str) -> str:
    """Return the command that installs the packages of one of pyproject.toml's extras."""
    if IN_CLONE:
        return f".venv/bin/pip install -c constraints.txt -e '.[{extra}]'"  # as in docs/getting-started.md
    from importlib.metadata import requires

    needs = (requirement.partition(";") for requirement in requires("attention-pipeline") or [])
    packages = [
        f"'{package.strip()}'" for package, _, when in needs if re.search(rf"""extra == ["']{extra}["']""", when)
    ]
    return f"{sys.executable} -m pip install {' '.join(packages)}"
