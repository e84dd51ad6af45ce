"""Run all checks, in one process or on all ranks of a SLURM job step, and print their results."""

import argparse
from typing import TYPE_CHECKING

from pipeline.preflight.check_result import CheckResult, print_results
from pipeline.preflight.machine import check_machine
from pipeline.preflight.recipe import CheckContext, check_recipe, load_context

if TYPE_CHECKING:
    from pipeline.preflight.distributed import RankGroup
    from pipeline.runtime.slurm import JobStep


def run_checks(arguments: argparse.Namespace) -> int:
    """Run all checks and return the exit code; `arguments` are those of `doctor`."""
    from pipeline.runtime.slurm import current_step, mistakes

    launch_mistakes = [CheckResult(False, mistake) for mistake in mistakes()]
    step = None if launch_mistakes else current_step()
    if step is not None and step.num_tasks > 1:
        return _run_on_all_ranks(step, arguments)
    results = [*launch_mistakes, *check_machine(step)]
    context, loaded = load_context(arguments, step)
    results.append(loaded)
    if context is not None:
        results += check_recipe(context)
    return print_results(results)


def _run_on_all_ranks(step: "JobStep", arguments: argparse.Namespace) -> int:
    from pipeline.preflight.distributed import WAIT, RankGroup, UnresponsiveRanksError

    ranks = RankGroup(step)
    ranks.exit_after(3 * WAIT)
    if failures := ranks.connect():
        return print_results(failures)
    try:
        return _check_and_gather(ranks, arguments)
    except UnresponsiveRanksError as error:
        return print_results([CheckResult(False, str(error), ranks.location)])


def _check_and_gather(ranks: "RankGroup", arguments: argparse.Namespace) -> int:
    """Run this rank's checks; rank 0 prints the results of all ranks."""
    from pipeline.preflight.distributed import check_ranks

    step = ranks.step
    machine = check_machine(step)
    results = [result._replace(where=ranks.location) for result in machine if not result.ok or step.rank == 0]
    context, loaded = load_context(arguments, step)
    context, load_results = agree_on_context(ranks, context, loaded)
    results += load_results
    if step.rank == 0 and context is not None:
        results += check_recipe(context)
    results += check_ranks(ranks, context.recipe if context else None)
    everything = [CheckResult(*result) for theirs in ranks.all_gather(results) for result in theirs]
    if step.rank > 0:
        # srun kills all ranks when one exits with an error, and rank 0 holds the store: wait until it has printed.
        ranks.wait_for("printed", [0])
        ranks.store.set(f"left/{step.rank}", "")
        return int(not all(result.ok for result in everything))
    code = print_results(everything)
    ranks.store.set("printed/0", "")
    ranks.wait_for("left", list(range(1, step.num_tasks)))
    return code


def agree_on_context(
    ranks: "RankGroup", context: CheckContext | None, loaded: CheckResult
) -> tuple[CheckContext | None, list[CheckResult]]:
    """Return the context if every rank has loaded the recipe, and the results that this rank has to report.

    Ranks that run the checks of a recipe wait for one another, so either all of them run these checks or none.
    """
    everyones = [CheckResult(*one) for one in ranks.all_gather(loaded)]
    results = []
    if ranks.step.rank == 0:
        results = [loaded]
    elif everyones[0].ok and not loaded.ok:
        results = [loaded._replace(where=ranks.location)]
    return (context if all(one.ok for one in everyones) else None), results
