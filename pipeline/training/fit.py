"""`fit` from top to bottom: recipe, checks, corpus, backend, module, data, callbacks, Trainer, training.

torch and Lightning take seconds to import. Functions import them where they are needed, so that mistakes in a command,
a recipe or a folder are refused before that.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_module.errors import SCRIPTS
from pipeline.runtime import signals
from pipeline.runtime.console import quiet_lightning, say
from pipeline.runtime.launch import current_step, process_rank
from pipeline.training.start import Start, begin_from, finished_reason, open_start, should_reset

if TYPE_CHECKING:
    from lightning.pytorch import Callback

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

    return fit_recipe(load_recipe(configs, overrides), reset, init_from)


def fit_recipe(
    recipe: "Recipe", reset: bool, init_from: Path | None, further_callbacks: Sequence["Callback"] = ()
) -> int:
    """Do what `fit` does with a recipe whose keys have been checked; see `train` for `further_callbacks`."""
    from pipeline.config.settings import validate_trainer_keys
    from pipeline.training.checks import CheckContext, refuse_mistakes

    quiet_lightning()
    with recipe.naming_places():
        job = current_step()
        validate_trainer_keys(recipe.trainer)
        # One rank checks, so that a mistake is said once. Its exit code ends the other ranks of the job.
        if process_rank() == 0:
            refuse_mistakes(CheckContext(recipe, job, reset, init_from))
        reset = should_reset(reset, recipe.run_folder(), job)
        # The run or model to begin from comes first: a corpus that is prepared now has to have its vocabulary.
        recipe, tokenizer, initial = begin_from(recipe, reset, init_from)
        manifest = ensure_corpus(recipe.corpus, tokenizer)
        # The run folder is locked until training ends, so that no other process writes to it.
        with open_start(recipe, job, reset, initial, manifest) as start:
            if not has_finished(start):
                train(start, further_callbacks)
                run = recipe.run_folder()
                say(f"the run is in {run}; view it with: {SCRIPTS}tensorboard --logdir {run}")
    return 0


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
    from data_module.corpus.manifest import TOKENIZER_NAME, summary
    from data_module.corpus.preparation import existing_corpus, prepare
    from data_module.tokenization.tokenizer import Tokenizer
    from pipeline.inference.pieces import piece_report

    # One rank reads all texts to compare their hashes.
    manifest = existing_corpus(settings, compare_texts=process_rank() == 0)
    if manifest is not None:
        say(f"{settings.folder} is up to date")
        return manifest
    with signals.default_signals():
        manifest = prepare(settings, tokenizer)
        learned = Tokenizer.load(Path(settings.folder) / TOKENIZER_NAME).also_seen(tokenizer)
        for line, _ in piece_report(settings, learned):
            say(line)
    say(summary(manifest))
    return manifest


def has_finished(start: Start) -> bool:
    """Return whether nothing is left to train; say so, or from where training starts."""
    if start.resume is not None:
        if reason := finished_reason(start.recipe, start.recipe.run_folder(), start.resume.step):
            say(f"{start.recipe.run_folder()}: {reason}, or use --fresh")
            return True
        say(f"resuming from {start.resume.path}")
    elif start.initial is not None:
        say(f"starting from the weights and the tokenizer of {start.initial.path}")
    return False


def train(start: Start, further_callbacks: Sequence["Callback"] = ()) -> None:
    """Train until `trainer.max_steps`, early stopping, or a request to stop.

    Nothing in the run folder changes before everything that can be wrong has been checked, memory included.

    Args:
        start: the run.
        further_callbacks: called after those of `build_callbacks`. They do not see the step after which the run stops,
            because `GracefulStop` raises before them.
    """
    import torch

    from pipeline.runtime.backend import choose_backend
    from pipeline.runtime.compiled_code import start_compiler
    from pipeline.runtime.devices import allow_tf32
    from pipeline.training.build import build_callbacks, build_data, build_module, build_trainer
    from pipeline.training.trainer import trainer_options

    recipe = start.recipe
    options = trainer_options(recipe.trainer, start.job, recipe.run.timeout_seconds)
    allow_tf32(options)
    run = recipe.run
    backend = choose_backend(run.kernels, run.compile, options, recipe.network)
    for line in (*backend.notes, backend.line()):
        say(line)
    module = build_module(recipe, start.tokenizer, backend)
    if start.initial is not None:
        module.network.load_state_dict(start.initial.weights)
    if backend.compiled and torch.cuda.is_available():
        start_compiler()
    data = build_data(recipe, start.tokenizer, backend)
    if text_sources := data.validation_sources():
        module.report_sources(text_sources.names, torch.from_numpy(text_sources.of_pair))
    callbacks = [*build_callbacks(start, data, backend), *further_callbacks]
    trainer = build_trainer(start, options, callbacks)
    with signals.keyboard_interrupt_recorded():
        path = start.resume.path if start.resume else None
        trainer.fit(module, datamodule=data, ckpt_path=path, weights_only=True)
