"""Check this machine, the SLURM job and a recipe before training.

The options are those of the `fit` that is checked; nothing is started or removed.

Prints a line per check: `ok`, `note` with advice, or `WRONG` with what is wrong and what to do. The exit code is 1 if
a check failed, 69 if ranks of a job are missing or do not respond, which the next start may not repeat.
"""

import argparse

from data_module.errors import InputError
from pipeline.commands import fit
from pipeline.runtime.launch import RANKS_MISSING, current_job_step, report_mistake_to_script


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `fit`; a recipe is not needed to check the machine."""
    fit.add_arguments(parser, needs_recipe=False)


def run(arguments: argparse.Namespace) -> int:
    """Run all checks and print the results; of several ranks, only the first one prints."""
    job, wrong = None, 0
    try:
        job = current_job_step()
    except InputError as mistake:
        # Printed before anything that takes time: another rank that waits for this one in vain ends the step.
        print(f"WRONG {mistake}", flush=True)
        wrong = 1
    from pipeline.doctor.doctor import run_checks  # Its imports take seconds.

    code = run_checks(arguments, job) or wrong
    if code not in (0, RANKS_MISSING):
        report_mistake_to_script()
    return code
