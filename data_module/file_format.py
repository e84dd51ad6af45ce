"""The format of what one command writes and another reads: corpora, run folders, checkpoints and bundles."""

from pathlib import Path

from data_module.errors import InputError

FORMAT_VERSION = 2
"""Stored under `format_version`. It goes up when a version cannot read what earlier ones have written."""


def check_format(path: Path, version: object, start_over: str) -> None:
    """Raise InputError unless a file has the format that this version reads.

    Args:
        path: the file.
        version: its `format_version`; None if it has none.
        start_over: how to make the file anew, such as "export it again".
    """
    if type(version) is not int:  # True is an instance of int.
        found = "missing" if version is None else f"{version!r}, not a number"
        raise InputError(f"{path}: its format_version is {found}; {start_over}")
    if version > FORMAT_VERSION:
        raise InputError(
            f"{path}: has format {version}, and this version reads format {FORMAT_VERSION}; use a newer version of "
            "attention-pipeline"
        )
    if version < FORMAT_VERSION:
        raise InputError(
            f"{path}: has format {version}, made by version 0.2 or earlier; {start_over}, or use revision 748e0fa"
        )
