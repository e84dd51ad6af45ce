"""Command-line arguments that several commands share."""

import argparse

from data_module.files import user_path


def add_recipe_arguments(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Add `--config`, a list of recipe files; without `required`, the list may be empty."""
    parser.add_argument(
        "--config",
        type=user_path,
        action="append",
        metavar="FILE",
        required=required,
        default=None if required else [],
        help="recipe file; repeat the option for overlays, the last one wins; `--config` itself may be left out",
    )
