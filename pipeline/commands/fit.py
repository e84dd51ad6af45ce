"""Corpus folder -> run folder. Run again, it resumes; a missing corpus is prepared first.

Settings of the recipe may be given as --section.key value, Lightning's as --trainer.key value. docs/recipes.md lists
all settings with type, default and meaning, and has a table of sizes, memory and hours.
"""

import argparse

from data_module.system.files import user_path
from pipeline.config.recipe import add_recipe_arguments, load_recipe
from pipeline.runtime import signals
from pipeline.runtime.launch import process_rank, reports_exit_code
from pipeline.runtime.signals import Stopped


def add_arguments(parser: argparse.ArgumentParser, needs_recipe: bool = True) -> None:
    """Add the command's options."""
    add_recipe_arguments(parser, required=needs_recipe)
    parser.add_argument("--fresh", action="store_true", help="start over: remove the existing run")
    parser.add_argument(
        "--init-from",
        type=user_path,
        metavar="CHECKPOINT",
        help="begin a new run with the weights and the tokenizer of another run or of a Marian model",
    )


def run(arguments: argparse.Namespace) -> int:
    """Start or resume training; on rank 0, report a requested stop as this process's exit code."""
    from pipeline.doctor.recipe_checks import checked_folder  # Not needed for --help.

    try:
        recipe = load_recipe(arguments.config, arguments.overrides)
        with checked_folder(recipe, arguments.fresh) as folder:
            from pipeline.fit import fit  # torch and Lightning, which take seconds to import

            fit(recipe, folder, arguments.fresh, arguments.init_from)
        return 0
    except Stopped as stop:
        if not reports_exit_code(process_rank()):
            return 0
        raise stop if process_rank() == 0 else SystemExit(stop.exit_code) from None
    finally:
        signals.ignore()
