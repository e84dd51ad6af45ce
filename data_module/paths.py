"""Paths as users write them, in recipes, options and the Python API."""

from pathlib import Path
from typing import Annotated

from data_module.errors import InputError

PathText = Annotated[str, "path"]
"""The type of a recipe's key that holds a path."""


def user_path(text: str | Path) -> Path:
    """Return a path whose `~` or `~name` at the beginning is replaced by the home folder.

    Raises:
        InputError: there is no such home folder.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError:
        home = Path(text).parts[0]
        raise InputError(
            f"{text}: the home folder {home} is unknown; write the whole path, or ./{home} for a name that begins so"
        ) from None
