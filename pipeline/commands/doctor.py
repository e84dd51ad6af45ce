"""Check this machine, the SLURM job and a recipe before training.

Prints a line per check: `ok`, or `WRONG` with what is wrong and what to do. The exit code is 1 if a check failed, 69 if
ranks of a job are missing or do not respond, which may be different at the next start.
"""

import argparse
import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from data_module.errors import InputError, printable
from data_module.files import user_path
from pipeline.config.recipe import add_recipe_arguments
from pipeline.training.checks import CheckContext, CheckResult, check_backend, check_machine, check_recipe

if TYPE_CHECKING:
    from pipeline.runtime.launch import JobStep
    from pipeline.training.rank_checks import RankGroup


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
    from pipeline.runtime.launch import RANKS_MISSING, report_mistake_to_script

    code = run_checks(arguments.config, arguments.overrides, arguments.fresh, arguments.init_from)
    if code not in (0, RANKS_MISSING):
        report_mistake_to_script()
    return code


Load = Callable[["JobStep | None"], tuple[CheckContext | None, CheckResult]]
"""`load_context` for a job step. Loading takes seconds, so ranks connect first and fail early if they cannot."""


def run_checks(configs: list[Path], overrides: list[str], reset: bool, init_from: Path | None) -> int:
    """Run all checks of what `fit` would do with these arguments, and return the exit code."""
    from pipeline.runtime.launch import current_step, mistakes

    load = partial(load_context, configs, overrides, reset, init_from)
    # Printed before anything takes time: another rank that misses this one ends the step.
    code = print_results([CheckResult(False, mistake) for mistake in mistakes()])
    job = None if code else current_step()
    if job is not None and job.num_tasks > 1:
        return _run_on_all_ranks(job, load)
    context, loaded = load(job)
    results = [*check_machine(job), loaded]
    if context is not None:
        results += check_recipe(context)
    return print_results(results) or code


def _run_on_all_ranks(job: "JobStep", load: Load) -> int:
    """Run the checks on this rank; rank 0 prints the results of all ranks."""
    from pipeline.runtime.console import RendezvousError, UnusableAddressError
    from pipeline.runtime.launch import RANKS_MISSING
    from pipeline.runtime.rendezvous import Rendezvous
    from pipeline.training.rank_checks import RankGroup  # Importing torch is no part of the time to connect.

    try:
        ranks = RankGroup(job)
        ranks.connect(Rendezvous.of_job(job))
        gathered = ranks.all_gather(_results_of(ranks, load))
        results = [CheckResult(*result) for theirs in gathered for result in theirs]
        code = print_results(results) if job.rank == 0 else exit_code(results)
        ranks.leave()
    except (InputError, UnusableAddressError) as error:
        return print_results([CheckResult(False, str(error), job.location)])
    except RendezvousError as error:
        print_results([CheckResult(False, str(error), job.location)])
        return RANKS_MISSING
    if job.rank == 0 and code == 0:
        # Programs may have to be compiled first, and no rank waits any more.
        context, _ = load(job)
        return print_results(list(check_backend(context))) if context is not None else code
    return code


def _results_of(ranks: "RankGroup", load: Load) -> list[CheckResult]:
    """Return what this rank has to report: of checks whose results all ranks share, rank 0 reports them."""
    from pipeline.training.rank_checks import check_ranks

    is_first = ranks.job.rank == 0
    machine = [one for one in check_machine(ranks.job) if is_first or one.is_warning or not one.ok]
    context, results = agree_on_context(ranks, *load(ranks.job))
    if is_first and context is not None:
        results += check_recipe(context)
    results += check_ranks(ranks, context.recipe if context else None)
    return [*(result._replace(where=ranks.location) for result in machine), *results]


def agree_on_context(
    ranks: "RankGroup", context: CheckContext | None, loaded: CheckResult
) -> tuple[CheckContext | None, list[CheckResult]]:
    """Return the context if every rank has loaded the recipe, and the results that this rank has to report.

    Ranks that run the checks of a recipe wait for one another, so either all of them run these checks or none.
    """
    from pipeline.checkpointing.run_folder import settings_of_ranks
    from pipeline.runtime.rank_messages import plain
    from pipeline.runtime.rendezvous import differences

    own = settings_of_ranks(context.recipe) if context is not None else {}
    own = json.loads(json.dumps(own))  # as another rank sees it
    digest = hashlib.sha256(json.dumps(own).encode()).hexdigest()
    everyones = ranks.all_gather([loaded.ok, digest, own if ranks.job.rank == 0 else None])
    results = []
    if ranks.job.rank == 0:
        results = [loaded]
    elif everyones[0][0] and not loaded.ok:
        results = [loaded._replace(where=ranks.location)]
    elif loaded.ok and digest != everyones[0][1]:
        different = f"another recipe than rank 0's: {differences(plain(own), everyones[0][2])}; give all ranks the same"
        results = [CheckResult(False, different, ranks.location)]
    return (context if all(is_loaded for is_loaded, *_ in everyones) else None), results


def load_context(
    configs: list[Path], overrides: list[str], reset: bool, init_from: Path | None, job: "JobStep | None"
) -> tuple[CheckContext | None, CheckResult]:
    """Load the recipe; `configs` to `init_from` are the arguments of `fit`.

    Returns:
        The context for `check_recipe`, None without a valid recipe, and the result of loading it.
    """
    from pipeline.config.recipe import load_recipe
    from pipeline.config.settings import validate_trainer_keys

    if not configs:
        if overrides:
            hint = "give one with --config FILE"
            return None, CheckResult(False, f"argument '{overrides[0]}' is unknown without a recipe; {hint}")
        return None, CheckResult(True, "no recipe to check; give one with --config FILE")
    try:
        recipe = load_recipe(configs, overrides)
        with recipe.naming_places():
            validate_trainer_keys(recipe.trainer)
    except InputError as error:
        return None, CheckResult(False, str(error))
    return CheckContext(recipe, job, reset, init_from), CheckResult(True, f"recipe {recipe.name}")


def print_results(results: list[CheckResult]) -> int:
    """Print a line per result and return the exit code: 0, or 1 if a check failed.

    Results that several ranks have in common are printed once, with all their nodes and ranks.
    """
    places: dict[tuple[str, str], list[str]] = {}
    for result in results:
        label = "WRONG" if not result.ok else "note " if result.is_warning else "ok   "
        places.setdefault((label, result.message), []).append(result.where)
    for (label, message), where in places.items():
        ranks = "; ".join(dict.fromkeys(filter(None, where)))
        print(printable(f"{label} {message}" + (f" [{ranks}]" if ranks else "")), flush=True)
    return exit_code(results)


def exit_code(results: list[CheckResult]) -> int:
    """Return 0, or 1 if a check failed."""
    return int(not all(result.ok for result in results))
