"""A bundle on disk: its folder, the program in it and its card. `pipeline/export` writes bundles."""

import os
from pathlib import Path

from data_module.errors import InputError
from data_module.files import PlainValues, check_format, json_object

PROGRAM_FILE = "model.ts"
"""The file that translates, a program in TorchScript."""
CARD_FILE = "card.json"
START_OVER = "export it again"
"""The way out in messages about a bundle that this version cannot read."""


def bundle_of(path: Path) -> Path | None:
    """Return the folder of the bundle that a path names by its folder or its `model.ts`; None if it names none.

    A run folder is no bundle, whatever it holds: `model.ts` is a program, and using a run must not execute files.
    """
    folder = path.parent if path.name == PROGRAM_FILE else path
    is_run = any(map(os.path.lexists, (folder / "config.yaml", folder / "checkpoints")))
    return folder if not is_run and (folder / CARD_FILE).is_file() else None


def parse_card(path: Path, text: str | bytes) -> PlainValues:
    """Return the card that a file holds.

    Raises InputError if it is no card, or of another format.
    """
    card = json_object(text)
    if card is None:
        raise InputError(f"{path}: is no card of a bundle; {START_OVER}")
    check_format(path, card.get("format_version"), START_OVER)
    return card
