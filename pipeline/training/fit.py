"""`fit`: prepare the corpus if necessary, then start a run, resume it, or report that it has finished."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_module.errors import SCRIPTS
from pipeline.runtime import signals
from pipeline.runtime.console import quiet_lightning, say
from pipeline.runtime.launch import current_step, process_rank
from pipeline.training.start import Start, open_start, should_reset

if TYPE_CHECKING:
    from data_module.settings import CorpusSettings
    from data_module.tokenization.tokenizer import Tokenizer
    from pipeline.config.recipe import Recipe


def fit(configs: list[Path], overrides: list[str], reset: bool, init_from: Path | None) -> int:
    """Prepare the corpus if necessary, then start or resume the recipe's run; return the exit code.

    Args:
        configs: a recipe and its overlays.
        overrides: settings from the command line.
        reset: remove the run that is in the run folder (`--fresh`).
        init_from: checkpoint, run folder or Marian model whose weights and tokenizer a new run takes over.

    Raises InputError for a user's mistake, Stopped when a signal or `trainer.max_time` stopped the run.
    """
    from pipeline.config.recipe import load_recipe
    from pipeline.config.settings import trainer_signature

    return fit_recipe(load_recipe(configs, overrides, trainer_signature()), reset, init_from)


def fit_recipe(recipe: "Recipe", reset: bool, init_from: Path | None) -> int:
    """Do what `fit` does with a recipe whose keys have been checked."""
    with recipe.naming_places():
        return _fit_recipe(recipe, reset, init_from)


def _fit_recipe(recipe: "Recipe", reset: bool, init_from: Path | None) -> int:
    from data_module.corpus.manifest import is_corpus
    from pipeline.checkpointing.run_folder import inherit_network, latest_valid
    from pipeline.config.settings import validate_trainer_keys
    from pipeline.training.checks import CheckContext, refuse_mistakes
    from pipeline.training.start import load_initial_weights

    quiet_lightning()
    job = current_step()
    validate_trainer_keys(recipe.trainer)
    if process_rank() == 0:
        refuse_mistakes(CheckContext(recipe, job, reset, init_from))
    reset = should_reset(reset, recipe.run_folder(), job)
    initial = tokenizer = None
    checkpoint = None if reset else latest_valid(recipe.run_folder())[0]
    if checkpoint is not None:
        recipe = inherit_network(recipe.run_folder(), recipe)
        if not is_corpus(recipe.corpus_folder()):
            # A corpus that is prepared anew for the run needs the run's vocabulary.
            from data_module.tokenization.tokenizer import Tokenizer
            from pipeline.checkpointing.checkpoint import read_checkpoint, tokenizer_of  # imports torch

            tokenizer = Tokenizer(tokenizer_of(read_checkpoint(checkpoint)))
        if init_from is not None:
            say(f"{recipe.run_folder()}: resuming this run; --init-from is ignored")
    elif init_from is not None:
        initial = load_initial_weights(init_from, recipe)
        tokenizer, recipe = initial.tokenizer, recipe.inherit_network(initial.network)
    manifest = ensure_corpus(recipe.corpus, tokenizer)
    with open_start(recipe, job, reset, initial, manifest) as start:
        return resume_or_start(start)


def resume_or_start(start: Start) -> int:
    """Train from where the run stands, unless it has finished; return the exit code."""
    from pipeline.training.build import train

    path, report = start.recipe.run_folder(), start.folder is not None
    if start.resume is not None:
        if reason := finished_reason(start.recipe, path, start.resume.step):
            if report:
                print(f"{path}: {reason}, or use --fresh", file=sys.stderr)
            return 0
        if report:
            print(f"resuming from {start.resume.path}", file=sys.stderr)
    elif start.initial is not None and report:
        print(f"starting from the weights and the tokenizer of {start.initial.path}", file=sys.stderr)
    train(start)
    if report:
        print(f"the run is in {path}; view it with: {SCRIPTS}tensorboard --logdir {path}", file=sys.stderr)
    return 0


def finished_reason(recipe: "Recipe", path: Path, step: int) -> str | None:
    """Return why a run at this step has nothing left to train, and what would change that; None if it has."""
    from model.settings import DECAY_TO_LAST_STEP
    from pipeline.checkpointing.run_folder import STOPPED_EARLY

    if step >= recipe.trainer["max_steps"]:
        if recipe.training.schedule in DECAY_TO_LAST_STEP:
            return f"finished at step {step}, where training.schedule {recipe.training.schedule} ends"
        return f"finished at step {step}; raise trainer.max_steps to continue"
    if (path / STOPPED_EARLY).exists():
        stop = json.loads((path / STOPPED_EARLY).read_text(encoding="utf-8"))
        if stop["step"] == step and recipe.run.patience is not None and recipe.run.patience <= stop["patience"]:
            without = f"{stop['patience']} validations without a better BLEU"
            return f"stopped early at step {step} after {without}; raise run.patience to continue"
    return None


def ensure_corpus(settings: "CorpusSettings", tokenizer: "Tokenizer | None" = None) -> dict[str, Any]:
    """Prepare the corpus unless it is there, check it against the settings, and return its manifest.

    Of several ranks one prepares the corpus and the others wait. Only rank 0 reads the texts again to see that they are
    unchanged, where they are available.

    While a corpus is being prepared, a stop signal ends every rank at once. Otherwise no rank ends by itself, because
    the others would wait for it: they agree on stopping when training starts.

    Args:
        settings: the recipe's `corpus:` section.
        tokenizer: takes the place of one learned from the text.

    Raises InputError as `prepare` does.
    """
    from data_module.corpus.manifest import summary
    from data_module.corpus.preparation import existing_corpus, prepare

    # One rank reads all texts to compare their hashes.
    manifest = existing_corpus(settings, compare_texts=process_rank() == 0)
    if manifest is not None:
        say(f"{settings.folder} is up to date")
        return manifest
    with signals.default_signals():
        manifest = prepare(settings, tokenizer)
    if process_rank() == 0:
        print(summary(manifest), file=sys.stderr)
    return manifest
