"""Checks of a recipe on this machine: its keys, texts, corpus, initial weights, run folder and disk space."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.preflight.check_result import CheckResult

if TYPE_CHECKING:
    from data_module.settings import CorpusSettings, TextSource
    from pipeline.config.recipe import Recipe
    from pipeline.runtime.slurm import JobStep


@dataclass(frozen=True)
class CheckContext:
    """What `fit` would be run with."""

    recipe: "Recipe"
    job: "JobStep | None"
    """The SLURM job step of this process; None outside a job."""
    reset: bool
    """Whether the run in the run folder would be removed (`--fresh`)."""
    init_from: Path | None
    """Checkpoint or run folder whose weights a new run would start from."""


def load_context(
    configs: list[Path], overrides: list[str], reset: bool, init_from: Path | None, job: "JobStep | None"
) -> tuple[CheckContext | None, CheckResult]:
    """Load the recipe; `configs` to `init_from` are the arguments of `fit`.

    Returns:
        The context for `check_recipe`, None without a valid recipe, and the result of loading it.
    """
    from data_module.errors import InputError
    from pipeline.config.recipe import load_recipe
    from pipeline.config.trainer_keys import trainer_signature, validate_trainer_keys

    if not configs:
        if overrides:
            hint = "give one with --config FILE"
            return None, CheckResult(False, f"argument '{overrides[0]}' is unknown without a recipe; {hint}")
        return None, CheckResult(True, "no recipe to check; give one with --config FILE")
    try:
        recipe = load_recipe(configs, overrides, trainer_signature())
        validate_trainer_keys(recipe.trainer)
    except InputError as error:
        return None, CheckResult(False, str(error))
    return CheckContext(recipe, job, reset, init_from), CheckResult(True, f"recipe {recipe.name}")


def check_recipe(context: CheckContext) -> Iterator[CheckResult]:
    """Run all checks of a recipe."""
    for check in CHECKS:
        yield from check(context)


def check_accelerator(context: CheckContext) -> Iterator[CheckResult]:
    """Check that the machine has the accelerator that the recipe asks for."""
    from pipeline.training.precision import missing_gpu

    if missing := missing_gpu(context.recipe.trainer.get("accelerator", "auto")):
        yield CheckResult(False, missing)


def check_kernels(context: CheckContext) -> Iterator[CheckResult]:
    """Check that the machine can run the kernels that the recipe asks for."""
    from data_module.errors import InputError
    from pipeline.training.kernels import choose_kernels
    from pipeline.training.precision import best_precision

    trainer = context.recipe.trainer
    accelerator = trainer.get("accelerator", "auto")
    options = {"devices": "auto", **trainer, "accelerator": accelerator}
    options["precision"] = trainer.get("precision") or best_precision(accelerator)
    try:
        choose_kernels(context.recipe.run.kernels, options, context.recipe.network)
    except InputError as error:
        yield CheckResult(False, str(error))


def check_corpus(context: CheckContext) -> Iterator[CheckResult]:
    """Check the prepared corpus, or, before it is prepared, the texts that it is made from."""
    settings = context.recipe.corpus
    if (Path(settings.folder) / "manifest.json").exists():
        yield _check_prepared(settings)
    else:
        for text in settings.texts():
            yield from check_text(text, settings)


def check_initial_state(context: CheckContext) -> Iterator[CheckResult]:
    """Check the run that would be resumed, or else the weights that a new run would start from."""
    from data_module.errors import InputError
    from pipeline.checkpointing.checkpoint_files import latest_valid
    from pipeline.checkpointing.run_folder import differences, different_run_message
    from pipeline.training.init_from import load_initial_weights
    from pipeline.training.start import should_reset

    run = context.recipe.run_folder()
    if not should_reset(context.reset, run, context.job) and latest_valid(run)[0] is not None:
        if forbidden := differences(run, context.recipe)[0]:
            yield CheckResult(False, different_run_message(run, forbidden))
    elif context.init_from:
        try:
            weights = load_initial_weights(context.init_from, context.recipe)
        except InputError as error:
            yield CheckResult(False, str(error))
        else:
            yield CheckResult(True, f"starts from the weights of {weights.path}")


def check_run_folder(context: CheckContext) -> Iterator[CheckResult]:
    """Check that the run folder can be written and that its disk has room for the checkpoints."""
    from pipeline.checkpointing.checkpoint_files import checkpoint_bytes

    recipe = context.recipe
    run = recipe.run_folder()
    parent = existing_parent(run)
    if problem := _write_error(parent):
        yield CheckResult(False, f"run folder {run}: {parent} is not writable ({problem}); set another run.folder")
    else:
        yield CheckResult(True, f"run folder {run}")
    free = shutil.disk_usage(parent).free
    size = checkpoint_bytes(_num_parameters(recipe), recipe.training.ema_decay is not None)
    needed = size * (recipe.run.keep_last + 2)
    enough = free > needed
    hint = "" if enough else "; lower run.keep_last or set another run.folder"
    yield CheckResult(enough, f"{free / 2**30:.1f} GiB free, checkpoints need {needed / 2**30:.1f} GiB{hint}")


def check_hardware_keys(context: CheckContext) -> Iterator[CheckResult]:
    """Report `trainer.devices` and `trainer.num_nodes` that the job overrides."""
    if context.job is None:
        return
    for key, count in (("devices", context.job.tasks_per_node), ("num_nodes", context.job.num_nodes)):
        value = context.recipe.trainer.get(key, "auto")
        if value not in ("auto", -1, "-1", count, str(count)):
            yield CheckResult(True, f"trainer.{key} {value} is ignored: the job sets it to {count}")


CHECKS: tuple[Callable[[CheckContext], Iterator[CheckResult]], ...] = (
    check_accelerator,
    check_kernels,
    check_corpus,
    check_initial_state,
    check_run_folder,
    check_hardware_keys,
)


def existing_parent(path: Path) -> Path:
    """Return the path, or the nearest parent that exists."""
    return next(parent for parent in [path, *path.absolute().parents] if parent.exists())


def _num_parameters(recipe: "Recipe") -> int:
    import torch

    from model.transformer import Transformer

    with torch.device("meta"):
        parameters = Transformer(recipe.corpus.vocabulary_size, recipe.network).parameters()
    return sum(parameter.numel() for parameter in parameters)


def _check_prepared(settings: "CorpusSettings") -> CheckResult:
    from data_module.corpus.manifest import read_manifest
    from data_module.corpus.preparation import differs_from
    from data_module.errors import InputError

    try:
        different = differs_from(read_manifest(Path(settings.folder)), settings)
    except InputError as error:
        return CheckResult(False, str(error))
    message = f"corpus {settings.folder} is prepared"
    if different:
        message += f" with other settings: {'; '.join(different)}; set another corpus.folder, or run `prepare --force`"
    return CheckResult(not different, message)


def check_text(text: "TextSource", settings: "CorpusSettings") -> Iterator[CheckResult]:
    """Run the quick checks of a text source: that its files or data set exist. The text is not read."""
    from data_module.errors import InputError
    from data_module.readers.pairs import open_reader

    try:
        for ok, message in open_reader(text, settings).check():
            yield CheckResult(ok, message)
    except InputError as error:
        yield CheckResult(False, str(error))


def _write_error(folder: Path) -> str | None:
    """Return why no file can be created there, or None; os.access would not do, since it allows root everything."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror
