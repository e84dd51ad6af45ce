"""Checks of a recipe on this machine: its keys, texts, corpus, initial weights, run folder and disk space."""

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from data_module.errors import InputError
from data_module.files import existing_parent
from pipeline.preflight.check_result import CheckResult
from pipeline.training import checks
from pipeline.training.checks import CheckContext

if TYPE_CHECKING:
    from data_module.corpus.checks import SourceCheck
    from data_module.settings import CorpusSettings, TextSource
    from pipeline.config.recipe import Recipe
    from pipeline.runtime.launch import JobStep


def load_context(
    configs: list[Path], overrides: list[str], reset: bool, init_from: Path | None, job: "JobStep | None"
) -> tuple[CheckContext | None, CheckResult]:
    """Load the recipe; `configs` to `init_from` are the arguments of `fit`.

    Returns:
        The context for `check_recipe`, None without a valid recipe, and the result of loading it.
    """
    from pipeline.config.recipe import load_recipe
    from pipeline.config.trainer_keys import trainer_signature, validate_trainer_keys

    if not configs:
        if overrides:
            hint = "give one with --config FILE"
            return None, CheckResult(False, f"argument '{overrides[0]}' is unknown without a recipe; {hint}")
        return None, CheckResult(True, "no recipe to check; give one with --config FILE")
    try:
        recipe = load_recipe(configs, overrides, trainer_signature())
        with recipe.naming_places():
            validate_trainer_keys(recipe.trainer)
    except InputError as error:
        return None, CheckResult(False, str(error))
    return CheckContext(recipe, job, reset, init_from), CheckResult(True, f"recipe {recipe.name}")


def check_recipe(context: CheckContext) -> Iterator[CheckResult]:
    """Run the checks that `fit` runs before it trains, and those that only `doctor` has."""
    for check in (check for check in checks.CHECKS if check is not checks.check_corpus):
        yield from result_of(context.recipe, partial(check, context))
    if warning := checks.cpu_devices_warning(context):
        yield CheckResult(True, warning, is_warning=True)
    # The other ranks of a job would wait too long for text to be read, and `fit` reads it next.
    is_quick = context.job is not None and context.job.num_tasks > 1
    yield from check_corpus(context.recipe, is_quick, context.init_from is None)
    yield check_disk_space(context.recipe)
    yield from check_hardware_keys(context)


def result_of(recipe: "Recipe", check: Callable[[], str | None]) -> Iterator[CheckResult]:
    """Run one check; yield what it returned, if it did, or the InputError that it raised."""
    try:
        with recipe.naming_places():
            message = check()
    except InputError as error:
        yield CheckResult(False, str(error))
    else:
        if message:
            yield CheckResult(True, message)


def check_corpus(recipe: "Recipe", is_quick: bool, learns: bool) -> Iterator[CheckResult]:
    """Check the prepared corpus, or, before it is prepared, its settings, folder and texts as `prepare` does.

    Likely mistakes in the texts are named before and after they are prepared.

    Args:
        recipe: the recipe.
        is_quick: do not read any text.
        learns: whether the run begins without the tokenizer and weights of another one.
    """
    from data_module.corpus.builder import check_vocabulary_size
    from data_module.corpus.checks import check_folder, check_settings, size_warnings, source_warnings
    from data_module.corpus.preparation import existing_corpus
    from data_module.readers.pairs import all_available

    settings = recipe.corpus
    try:
        with recipe.naming_places():
            check_settings(settings)
            is_prepared = existing_corpus(settings, compare_texts=not is_quick) is not None
            if not is_prepared:
                check_folder(settings)
    except InputError as error:
        yield CheckResult(False, str(error))
        return
    if is_prepared:
        yield CheckResult(True, f"corpus {settings.folder} is prepared")
        if is_quick or not all_available(settings):
            return
    checked: list[SourceCheck | None] = []
    for text in settings.texts():
        yield from check_text(text, settings, checked, is_quick)
    complete = [source for source in checked if source is not None]
    if len(complete) < len(settings.texts()):
        return
    warnings = source_warnings(settings, complete)
    if learns:
        train_pairs = [source.num_pairs for source in complete[: len(settings.train)]]
        check = partial(check_vocabulary_size, settings, train_pairs)
        refused = [] if is_prepared else list(result_of(recipe, check))
        yield from refused
        warnings += [] if refused else size_warnings(settings, complete)
    yield from (CheckResult(True, warning, is_warning=True) for warning in warnings)


def check_text(
    text: "TextSource", settings: "CorpusSettings", checked: "list[SourceCheck | None]", is_quick: bool = False
) -> Iterator[CheckResult]:
    """Check one text source, and append what was found to `checked`, None if the text was not read.

    Text is not read if `is_quick`, and if reading it needs a network.
    """
    from data_module.corpus.checks import check_source
    from data_module.readers.pairs import open_reader

    found = None
    try:
        reader = open_reader(text, settings)
        results = [CheckResult(ok, message) for ok, message in reader.check()]
        if not is_quick and all(result.ok for result in results) and reader.is_available():
            found = check_source(text, settings)
            results = [CheckResult(True, f"text {found.name}: {found.num_pairs:,} pairs")]
    except InputError as error:
        results = [CheckResult(False, str(error))]
    checked.append(found)
    yield from results


def check_disk_space(recipe: "Recipe") -> CheckResult:
    """Check that the run folder's disk has room for the checkpoints."""
    from pipeline.checkpointing.run_folder import checkpoint_bytes, max_checkpoints

    free = shutil.disk_usage(existing_parent(recipe.run_folder())).free
    size = checkpoint_bytes(_num_parameters(recipe), recipe.training.ema_decay is not None)
    needed = size * (max_checkpoints(recipe.run.keep_last) + 1)  # One more while it is written.
    enough = free > needed
    hint = "" if enough else "; lower run.keep_last or set another run.folder"
    return CheckResult(enough, f"{free / 2**30:.1f} GiB free, checkpoints need {needed / 2**30:.1f} GiB{hint}")


def check_hardware_keys(context: CheckContext) -> Iterator[CheckResult]:
    """Report `trainer.devices` and `trainer.num_nodes` that the job overrides."""
    if context.job is None:
        return
    for key, count in (("devices", context.job.tasks_per_node), ("num_nodes", context.job.num_nodes)):
        value = context.recipe.trainer.get(key, "auto")
        if value not in ("auto", -1, "-1", count, str(count)):
            yield CheckResult(True, f"trainer.{key} {value} is ignored: the job sets it to {count}")


def _num_parameters(recipe: "Recipe") -> int:
    import torch

    from model.transformer import Transformer

    with torch.device("meta"):
        parameters = Transformer(recipe.corpus.vocabulary_size, recipe.network).parameters()
    return sum(parameter.numel() for parameter in parameters)
