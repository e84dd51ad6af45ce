"""The checks of `doctor`: all checks of `fit`, even after a mistake, and those that take long or need all ranks."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

from data_module.corpus.builder import learn_tokenizer
from data_module.corpus.checks import TextChecker, given_tokenizer, size_warnings, source_warnings
from data_module.corpus.manifest import corpus_tokenizer, is_corpus
from data_module.errors import InputError, printable
from data_module.tokenization.tokenizer import Tokenizer
from pipeline.checkpointing.run_folder import is_in_use, settings_of_ranks
from pipeline.config.recipe import Recipe, load_recipe
from pipeline.config.settings import validate_trainer_keys
from pipeline.doctor.rank_checks import RankGroup, check_ranks, own_gpu
from pipeline.doctor.recipe_checks import CheckResult, Report, check_recipe
from pipeline.doctor.start_checks import check_backend, check_disk_space, check_machine, check_start
from pipeline.inference.pieces import piece_report
from pipeline.ranks.rendezvous import Rendezvous
from pipeline.runtime.console import RendezvousError, UnusableAddressError
from pipeline.runtime.devices import shared_processor
from pipeline.runtime.launch import RANKS_MISSING, JobStep
from pipeline.training.start import Plan, check_pairs, plan_start


class Findings(Report):
    """Collects what checks find."""

    def __init__(self, recipe: Recipe, reads_texts: bool) -> None:
        self.reads_texts = reads_texts
        self.results: list[CheckResult] = []
        self._recipe = recipe

    @contextmanager
    def part(self) -> Iterator[None]:
        """Record the mistake that ends the checks inside; later checks continue."""
        try:
            with self._recipe.naming_places():
                yield
        except InputError as error:
            self.add(CheckResult(False, str(error)))

    def add(self, result: CheckResult) -> None:
        """Record the result of a check, once."""
        if result not in self.results:
            self.results.append(result)


def run_checks(asked: argparse.Namespace, job: JobStep | None) -> int:
    """Run all checks of what `fit` would do, print the results and return the exit code.

    `asked` are the arguments of the command `doctor`, which are those of the `fit` that it checks.
    """
    if job is not None and job.num_tasks > 1:
        return _run_on_all_ranks(asked, job)
    recipe, loaded = load(asked)
    return print_results([*check_machine(job), loaded, *(check_fit(recipe, job, asked) if recipe else ())])


def load(asked: argparse.Namespace) -> tuple[Recipe | None, CheckResult]:
    """Return the recipe, or None if there is no valid one, and the result of loading it."""
    if not asked.config:
        if asked.overrides:
            hint = "give one with --config FILE"
            return None, CheckResult(False, f"argument '{asked.overrides[0]}' is unknown without a recipe; {hint}")
        return None, CheckResult(True, "no recipe to check; give one with --config FILE")
    try:
        recipe = load_recipe(asked.config, asked.overrides)
        with recipe.naming_places():
            validate_trainer_keys(recipe.trainer)
    except InputError as error:
        return None, CheckResult(False, str(error))
    return recipe, CheckResult(True, f"recipe {recipe.name}")


def check_fit(recipe: Recipe, job: JobStep | None, asked: argparse.Namespace) -> list[CheckResult]:
    """Return the results of all checks of what `fit` would do with a recipe on this rank."""
    is_alone = job is None or job.num_tasks == 1  # Other ranks would wait too long.
    findings = Findings(recipe, reads_texts=is_alone)
    plan = None
    texts = check_recipe(recipe, job, asked.fresh, findings)
    with findings.part():
        if not is_in_use(recipe.run_folder()):  # Checkpoints may be removed while they are read.
            plan = plan_start(recipe, job, asked.fresh, asked.init_from)
    for note in plan.notes if plan is not None else ():
        findings.note(note)
    check_start(plan or Plan(recipe, job, asked.fresh), findings)
    with findings.part():
        if plan is not None and plan.resume is not None and is_corpus(recipe.corpus_folder()):
            check_pairs(plan)
    if texts is not None and plan is not None:
        with findings.part():
            check_texts(plan, texts, findings)
    if is_alone:
        with findings.part():
            check_backend(recipe, job, findings)
    with findings.part():
        check_disk_space(recipe, findings)
    return findings.results


def check_texts(plan: Plan, texts: TextChecker, report: Report) -> None:
    """Report likely mistakes in the texts, and show their pieces."""
    settings = plan.recipe.corpus
    for line in source_warnings(settings, texts):
        report.note(line)
    tokenizer, is_prepared = plan.tokenizer, is_corpus(plan.recipe.corpus_folder())
    if is_prepared:
        tokenizer = corpus_tokenizer(plan.recipe.corpus_folder()).also_seen(tokenizer)
    elif (tokenizer := given_tokenizer(settings, tokenizer)) is not None:
        tokenizer = Tokenizer(tokenizer.model)  # The pieces that training will have seen are not known yet.
    # Otherwise vocabulary and weights come from another run or an earlier start of this one.
    if plan.tokenizer is None:
        if tokenizer is None:
            tokenizer = learn_tokenizer(settings, texts, progress=True)
        for line in size_warnings(settings, texts):
            report.note(line)
    if tokenizer is not None:
        for line, is_note in piece_report(settings, tokenizer):
            report.add(CheckResult(True, line, is_warning=is_note))


def _run_on_all_ranks(asked: argparse.Namespace, job: JobStep) -> int:
    """Run the checks on this rank; rank 0 prints the results of all ranks."""
    recipe, loaded = load(asked)
    try:
        ranks, meeting = RankGroup(job), Rendezvous.of_job(job)
        meeting.settings = _shared_settings(recipe, loaded, job)
        ranks.connect(meeting)
        gathered = ranks.all_gather(_results_of(ranks, recipe, loaded, asked))
        results = [CheckResult(*result) for theirs in gathered for result in theirs]
        code = print_results(results) if job.rank == 0 else exit_code(results)
        ranks.leave()
    except (InputError, UnusableAddressError) as error:
        mistake = CheckResult(False, str(error), job.location)
        return print_results([mistake] if loaded.ok else [loaded._replace(where=job.location), mistake])
    except RendezvousError as error:
        print_results([CheckResult(False, str(error), job.location)])
        return RANKS_MISSING
    if job.rank == 0 and code == 0 and recipe is not None:
        # Programs may have to be compiled first, and no rank waits any more.
        findings = Findings(recipe, reads_texts=False)
        with findings.part():
            check_backend(recipe, job, findings)
        return print_results(findings.results)
    return code


def _shared_settings(recipe: Recipe | None, loaded: CheckResult, job: JobStep) -> dict[str, object]:
    """Return what ranks have to have in common to run checks of all ranks: packages, and a recipe or one mistake.

    The run folder is left out: `check_ranks` says what is wrong with it.
    """
    packages: dict[str, object] = {name: version(name) for name in ("torch", "lightning", "numpy")}
    packages["recipe"] = loaded.message  # One that this rank alone cannot load is named before the keys that it lacks.
    if recipe is None:
        return packages
    gpu = None if recipe.trainer.get("accelerator") == "cpu" else own_gpu(job)
    settings = {**settings_of_ranks(recipe), **shared_processor(recipe.training.optimizer, gpu), "run.folder": None}
    return packages | settings


def _results_of(
    ranks: RankGroup, recipe: Recipe | None, loaded: CheckResult, asked: argparse.Namespace
) -> list[CheckResult]:
    """Return the results that this rank reports; rank 0 reports the results that all ranks share."""
    is_first = ranks.job.rank == 0
    machine = [one for one in check_machine(ranks.job) if is_first or one.is_warning or not one.ok]
    results = [loaded] if is_first else []
    if is_first and recipe is not None:
        results += check_fit(recipe, ranks.job, asked)
    results += check_ranks(ranks, recipe)
    return [*(result._replace(where=ranks.location) for result in machine), *results]


def print_results(results: list[CheckResult]) -> int:
    """Print one line per result and return the exit code: 0, or 1 if a check failed.

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
