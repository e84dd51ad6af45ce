"""Check this machine, the SLURM job and a recipe before training.

Prints a line per check: `ok`, or `WRONG` with what is wrong and what to do. The exit code is 1 if a check failed, 69 if
ranks of a job are missing or do not respond, which the next start may not repeat.
"""

import argparse

from data_module.errors import InputError
from data_module.files import user_path
from pipeline.config.recipe import add_recipe_arguments
from pipeline.runtime.launch import RANKS_MISSING, current_step, report_mistake_to_script


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
    job, wrong = None, 0
    try:
        job = current_step()
    except InputError as mistake:
        # Printed before anything that takes time: another rank that waits for this one in vain ends the step.
        print(f"WRONG {mistake}", flush=True)
        wrong = 1
    from pipeline.training.doctor import Question, run_checks  # Its imports take seconds.

    asked = Question(arguments.config, arguments.overrides, arguments.fresh, arguments.init_from)
    code = run_checks(asked, job) or wrong
    if code not in (0, RANKS_MISSING):
        report_mistake_to_script()
    return code
