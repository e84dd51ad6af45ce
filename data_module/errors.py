"""What a user did wrong, said in one line."""


class InputError(Exception):
    """A user's mistake.

    The message is one line that names the file, line or key and the way out. The commands print it without
    a traceback and end with exit code 2.
    """

    def __init__(self, message: str) -> None:
        """Take the message; line ends in it, such as those of a quoted key, are written as escapes."""
        super().__init__(message.replace("\r", "\\r").replace("\n", "\\n"))


def install(extra: str) -> str:
    """The command that adds one of pyproject.toml's extras to where this program runs, as README.md has it."""
    return f".venv/bin/pip install -c constraints.txt -e '.[{extra}]'"
