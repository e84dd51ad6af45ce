"""Run all checks, in one process or on all ranks of a SLURM job step, and print their results."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.preflight.check_result import CheckResult, print_results
from pipeline.preflight.machine import check_machine
from pipeline.preflight.recipe import check_recipe, load_context
from pipeline.training.checks import CheckContext

if TYPE_CHECKING:
    from pipeline.preflight.distributed import RankGroup
    from pipeline.runtime.launch import JobStep


Load = Callable[["JobStep | None"], tuple[CheckContext | None, CheckResult]]
"""`load_context` for a job step. Loading takes seconds, so ranks connect first and fail early if they cannot."""


def run_checks(configs: list[Path], overrides: list[str], reset: bool, init_from: Path | None) -> int:
    """Run all checks of what `fit` would do with these arguments, and return the exit code."""
    from pipeline.runtime.launch import current_step, mistakes

    load = partial(load_context, configs, overrides, reset, init_from)
    launch_mistakes = [CheckResult(False, mistake) for mistake in mistakes()]
    job = None if launch_mistakes else current_step()
    if job is not None and job.num_tasks > 1:
        return _run_on_all_ranks(job, load)
    context, loaded = load(job)
    results = [*launch_mistakes, *check_machine(job), loaded]
    if context is not None:
        results += check_recipe(context)
    return print_results(results)


def _run_on_all_ranks(job: "JobStep", load: Load) -> int:
    from pipeline.preflight.distributed import WAIT, RankGroup, UnresponsiveRanksError

    ranks = RankGroup(job)
    ranks.exit_after(3 * WAIT)
    if failures := ranks.connect():
        return print_results(failures)
    try:
        return _check_and_gather(ranks, load)
    except UnresponsiveRanksError as error:
        return print_results([CheckResult(False, str(error), ranks.location)])


def _check_and_gather(ranks: "RankGroup", load: Load) -> int:
    """Run this rank's checks; rank 0 prints the results of all ranks."""
    from pipeline.preflight.distributed import check_ranks

    rank = ranks.job.rank
    machine = [result for result in check_machine(ranks.job) if not result.ok or rank == 0]
    results = [result._replace(where=ranks.location) for result in machine]
    context, load_results = agree_on_context(ranks, *load(ranks.job))
    results += load_results
    if rank == 0 and context is not None:
        results += check_recipe(context)
    results += check_ranks(ranks, context.recipe if context else None)
    everything = [CheckResult(*result) for theirs in ranks.all_gather(results) for result in theirs]
    if rank > 0:
        # srun kills all ranks when one exits with an error, and rank 0 holds the store: wait until it has printed.
        ranks.wait_for("printed", [0])
        ranks.store.set(f"left/{rank}", "")
        return int(not all(result.ok for result in everything))
    code = print_results(everything)
    ranks.store.set("printed/0", "")
    ranks.wait_for("left", list(range(1, ranks.job.num_tasks)))
    return code


def agree_on_context(
    ranks: "RankGroup", context: CheckContext | None, loaded: CheckResult
) -> tuple[CheckContext | None, list[CheckResult]]:
    """Return the context if every rank has loaded the recipe, and the results that this rank has to report.

    Ranks that run the checks of a recipe wait for one another, so either all of them run these checks or none.
    """
    everyones = [CheckResult(*one) for one in ranks.all_gather(loaded)]
    results = []
    if ranks.job.rank == 0:
        results = [loaded]
    elif everyones[0].ok and not loaded.ok:
        results = [loaded._replace(where=ranks.location)]
    return (context if all(one.ok for one in everyones) else None), results
