"""Checks of a recipe: its keys, texts, corpus, run folder, starting weights and disk space."""

import argparse
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.preflight.check_result import CheckResult

if TYPE_CHECKING:
    from data_module.settings import CorpusSettings, TextSource
    from pipeline.config.recipe import Recipe
    from pipeline.runtime.slurm import JobStep


def load(paths: list[Path], overrides: list[str]) -> "Recipe | CheckResult":
    """The recipe, or what is wrong with it."""
    from data_module.errors import InputError
    from pipeline.config.recipe import load_recipe
    from pipeline.config.trainer_keys import trainer_signature, validate_trainer_keys

    if not paths:
        if overrides:
            return CheckResult(
                False, f"argument '{overrides[0]}' is unknown without a recipe; give one as --config FILE"
            )
        return CheckResult(True, "no recipe to look at; give one with --config")
    try:
        loaded = load_recipe(paths, overrides, trainer_signature())
        validate_trainer_keys(loaded.trainer)
        return loaded
    except InputError as error:
        return CheckResult(False, str(error))


def recipe(arguments: argparse.Namespace, step: "JobStep | None") -> Iterator[CheckResult]:
    """The recipe, its texts, what it begins from, and the places it writes to."""
    from pipeline.checkpointing.checkpoint import latest_valid
    from pipeline.training.start import should_reset

    loaded = load(arguments.config, arguments.overrides)
    if isinstance(loaded, CheckResult):
        yield loaded
        return
    yield CheckResult(True, f"recipe {loaded.name}")
    yield from accelerator(loaded.trainer.get("accelerator", "auto"))
    corpus = Path(loaded.corpus.folder)
    if (corpus / "manifest.json").exists():
        yield prepared(corpus, loaded.corpus)
    else:
        for text in loaded.corpus.texts():
            yield from text_source(text, loaded.corpus)
    run = loaded.run_folder()
    if not should_reset(arguments.fresh, run, step) and latest_valid(run)[0] is not None:
        yield from going_on(run, loaded)
    elif arguments.init_from:
        yield from beginning(arguments, loaded)
    place = next(parent for parent in [run, *run.absolute().parents] if parent.exists())
    problem = unwritable(place)
    hint = f": {place} is not writable ({problem}); give another run.folder"
    yield CheckResult(problem is None, f"run folder {run}" + ("" if problem is None else hint))
    free = shutil.disk_usage(place).free
    needed = checkpoint_bytes(loaded) * (loaded.run.keep_last + 2)
    enough = free > needed
    message = f"{free / 2**30:.1f} GiB free, its checkpoints need {needed / 2**30:.1f}"
    yield CheckResult(enough, message + ("" if enough else "; lower run.keep_last or give another run.folder"))


def beginning(arguments: argparse.Namespace, loaded: "Recipe") -> Iterator[CheckResult]:
    """Whether a new run could begin from the weights it is to have."""
    from data_module.errors import InputError
    from pipeline.training.init_from import load_initial_weights

    try:
        yield CheckResult(True, f"begins from the weights of {load_initial_weights(arguments.init_from, loaded).path}")
    except InputError as error:
        yield CheckResult(False, str(error))


def going_on(run: Path, loaded: "Recipe") -> Iterator[CheckResult]:
    """Whether the run that is there is the recipe's."""
    from pipeline.checkpointing.run_folder import differences, different_run_message

    if forbidden := differences(run, loaded)[0]:
        yield CheckResult(False, different_run_message(run, forbidden))


def prepared(corpus: Path, settings: "CorpusSettings") -> CheckResult:
    """Whether the corpus that is there is whole and the recipe's."""
    from data_module.corpus.manifest import read_manifest
    from data_module.corpus.preparation import differs_from
    from data_module.errors import InputError

    try:
        found = differs_from(read_manifest(corpus), settings)
    except InputError as error:
        return CheckResult(False, str(error))
    hint = f" with other settings: {'; '.join(found)}; name another corpus.folder, or run `prepare --force`"
    return CheckResult(not found, f"corpus {corpus} is prepared" + (hint if found else ""))


def accelerator(asked: str) -> Iterator[CheckResult]:
    """Whether what the recipe asks for is here."""
    from pipeline.training.precision import missing_gpu

    if missing := missing_gpu(asked):
        yield CheckResult(False, missing)


def unwritable(place: Path) -> str | None:
    """Why no file can be made there; root may do all that it is asked about, so it is tried."""
    try:
        with tempfile.TemporaryFile(dir=place):
            return None
    except OSError as error:
        return error.strerror


def text_source(text: "TextSource", settings: "CorpusSettings") -> Iterator[CheckResult]:
    """Check that a text source can be read."""
    from data_module.errors import InputError
    from data_module.readers.pairs import open_reader

    try:
        for ok, message in open_reader(text, settings).check():
            yield CheckResult(ok, message)
    except InputError as error:
        yield CheckResult(False, str(error))


def checkpoint_bytes(recipe: "Recipe") -> int:
    """Weights, Adam's two moments, and a moving average where there is one, in float32."""
    import torch

    from model.transformer import Transformer

    with torch.device("meta"):
        parameters = Transformer(recipe.corpus.vocabulary_size, recipe.network).parameters()
    copies = 3 if recipe.training.ema_decay is None else 4
    return 4 * copies * sum(parameter.numel() for parameter in parameters)
