"""Check this machine, the SLURM job and a recipe before training.

Prints a line per check: `ok`, or `WRONG` with what is wrong and what to do. The exit code is 1 if a check failed.
"""

import argparse

from data_module.paths import user_path
from pipeline.config.arguments import add_recipe_arguments
from pipeline.preflight.run_checks import run_checks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options, which are those of `fit`."""
    add_recipe_arguments(parser, required=False)
    parser.add_argument("--fresh", action="store_true", help="check for a run of `fit --fresh`")
    parser.add_argument(
        "--init-from",
        type=user_path,
        metavar="CHECKPOINT",
        help="check the weights that `fit --init-from` would start from",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run all checks and print the results; of several ranks, only the first one prints."""
    from pipeline.runtime.launch import report_mistake_to_script

    if code := run_checks(arguments.config, arguments.overrides, arguments.fresh, arguments.init_from):
        report_mistake_to_script()
    return code
