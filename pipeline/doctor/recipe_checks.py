"""Checks of a recipe that do not need torch, which takes seconds to import: `fit` refuses these mistakes at once.

`doctor` runs the same checks, continues after a mistake, and reads the texts as well.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

from data_module.corpus.checks import TextChecker, check_folder, check_settings, given_tokenizer
from data_module.corpus.manifest import is_corpus
from data_module.corpus.pairs import all_available, open_reader
from data_module.corpus.preparation import existing_corpus
from data_module.errors import InputError
from data_module.settings import CorpusSettings, TextSource
from model.settings import DECAY_TO_LAST_STEP
from pipeline.checkpointing.run_folder import (
    RunFolder,
    all_checkpoints,
    check_same_run,
    check_writable,
    in_use_error,
    is_in_use,
    should_reset,
)
from pipeline.config.recipe import Recipe
from pipeline.config.settings import validate_trainer_keys
from pipeline.runtime.console import quiet_lightning, say
from pipeline.runtime.launch import JobStep, current_job_step, process_rank

LOCK_PATIENCE_SECONDS = 120
"""How long a SLURM job waits for another process that writes to its run folder."""


class CheckResult(NamedTuple):
    """What one check found."""

    ok: bool
    message: str
    """What was checked if `ok`, else the problem and what to do."""
    where: str = ""
    """Node and rank, if the result holds for that rank only."""
    is_warning: bool = False
    """Whether the message names a likely mistake, which does not fail the check."""


class Report:
    """Takes the results of checks for `fit`: raises the first mistake, and prints likely mistakes."""

    reads_texts = False
    """Whether texts are read as well."""

    def part(self) -> AbstractContextManager[object]:
        """Return a context for checks; later checks do not depend on them."""
        return nullcontext()

    def add(self, result: CheckResult) -> None:
        """Take the result of a check; raise InputError for a mistake."""
        if not result.ok:
            raise InputError(result.message)
        if result.is_warning:
            say(result.message)

    def ok(self, message: str) -> None:
        """Report that a check has passed."""
        self.add(CheckResult(True, message))

    def note(self, message: str) -> None:
        """Report a likely mistake."""
        self.add(CheckResult(True, message, is_warning=True))


@contextmanager
def checked_folder(recipe: Recipe, fresh: bool) -> Iterator[RunFolder | None]:
    """Make the checks of `fit` that do not need torch, and give its run folder: on rank 0, locked; None on other ranks.

    It is locked until the context ends, so that no other process writes to the run. A requeued job may find its
    predecessor still writing: that process ends, or its lock is released.

    Raises InputError for a user's mistake, also one found inside the context; keys have their places in the recipe.
    """
    quiet_lightning()
    job = current_job_step()
    with recipe.naming_places():
        validate_trainer_keys(recipe.trainer)
        if process_rank():
            yield None
            return
        check_recipe(recipe, job, fresh, Report())
        folder = RunFolder(recipe.run_folder(), patience_seconds=LOCK_PATIENCE_SECONDS if job else 0)
        try:
            yield folder
        finally:
            folder.close()


def check_recipe(recipe: Recipe, job: JobStep | None, fresh: bool, report: Report) -> TextChecker | None:
    """Check settings, the run folder and the corpus or its texts; return what was found in them if all were read."""
    run = recipe.run_folder()
    with report.part():
        check_training(recipe)
    with report.part():
        reset = should_reset(fresh, run, job)
        check_writable(run, fresh=reset)
        in_use = is_in_use(run)
        if in_use and job is None:  # A requeued job waits for its predecessor to end.
            raise in_use_error(run)
        report.ok(f"run folder {run}")
        if not reset and not in_use and all_checkpoints(run):
            check_same_run(run, recipe, is_corpus(recipe.corpus_folder()))
    with report.part():
        return check_corpus(recipe.corpus, report)
    return None


def check_training(recipe: Recipe) -> None:
    """Raise InputError for settings of training that contradict other settings."""
    network, training, max_steps = recipe.network, recipe.training, recipe.trainer["max_steps"]
    if training.r_drop_alpha and not (network.dropout or network.attention_dropout or network.activation_dropout):
        raise InputError(
            f"training.r_drop_alpha {training.r_drop_alpha} compares passes with different dropout, and there is "
            "no dropout; give network.dropout, or remove training.r_drop_alpha"
        )
    if training.schedule in DECAY_TO_LAST_STEP and training.warmup_steps >= max_steps:
        raise InputError(
            f"training.warmup_steps {training.warmup_steps} leaves no step to training.schedule {training.schedule}, "
            f"which ends at trainer.max_steps {max_steps}; lower the former"
        )


def check_corpus(settings: CorpusSettings, report: Report) -> TextChecker | None:
    """Check the prepared corpus, or, before it is prepared, its settings, its folder and that its texts exist.

    Returns the results of reading the texts, if the report asks to read them and all of them could be read.
    """
    check_settings(settings)
    if existing_corpus(settings, compare_texts=report.reads_texts) is not None:
        report.ok(f"corpus {settings.folder} is prepared")
        if not report.reads_texts or not all_available(settings):
            return None
    else:
        check_folder(settings)
        given_tokenizer(settings)
    checker = TextChecker(settings)
    were_read = [check_text(checker, split, text, report) for split, text in checker.sources()]
    return checker if all(were_read) else None


def check_text(checker: TextChecker, split: str, text: TextSource, report: Report) -> bool:
    """Check that a text source exists, and read it if the report asks for that and it needs no network.

    Returns whether the source was read.
    """
    with report.part():
        reader = open_reader(text, checker.settings)
        results = list(reader.check())
        if report.reads_texts and all(ok for ok, _ in results) and reader.is_available():
            source = checker.check(split, text)
            report.ok(f"text {source.name}: {source.num_pairs:,} pairs")
            return True
        for ok, message in results:
            report.add(CheckResult(ok, message))
    return False
