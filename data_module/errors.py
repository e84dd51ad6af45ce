"""Errors caused by the user, reported in one line."""


class InputError(Exception):
    """An error in the user's input.

    The message is one line that names the file, line or key, and what to do. The commands print it without
    a traceback and exit with code 2.
    """

    def __init__(self, message: str) -> None:
        """Store the message. Line ends in it, such as those of a quoted key, are escaped."""
        super().__init__(message.replace("\r", "\\r").replace("\n", "\\n"))


def install(extra: str) -> str:
    """Return the command that installs one of pyproject.toml's extras, as in docs/getting-started.md."""
    return f".venv/bin/pip install -c constraints.txt -e '.[{extra}]'"
