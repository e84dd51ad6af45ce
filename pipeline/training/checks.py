"""Quick checks of what `fit` is asked to do, before it prepares a corpus. `doctor` runs the same ones."""

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from data_module.errors import InputError
from model.settings import DECAY_TO_LAST_STEP

if TYPE_CHECKING:
    from pipeline.config.recipe import Recipe
    from pipeline.runtime.launch import JobStep


@dataclass(frozen=True)
class CheckContext:
    """What `fit` is run with."""

    recipe: "Recipe"
    job: "JobStep | None"
    """The SLURM job step of this process; None outside a job."""
    reset: bool
    """Whether the run in the run folder would be removed (`--fresh`)."""
    init_from: Path | None
    """Checkpoint or run folder whose weights a new run would start from."""


def check_training(context: CheckContext) -> None:
    """Check settings of training and monitoring that depend on other sections."""
    recipe = context.recipe
    network, training, max_steps = recipe.network, recipe.training, recipe.trainer["max_steps"]
    if training.r_drop_alpha and not (network.dropout or network.attention_dropout or network.activation_dropout):
        raise InputError(
            f"training.r_drop_alpha {training.r_drop_alpha} compares passes with other dropout, and there is none; "
            "give network.dropout, or remove the former"
        )
    if training.schedule in DECAY_TO_LAST_STEP and training.warmup_steps >= max_steps:
        raise InputError(
            f"training.warmup_steps {training.warmup_steps} leaves no step to training.schedule {training.schedule}, "
            f"which ends at trainer.max_steps {max_steps}; lower the former"
        )
    plots, depth = recipe.monitoring, max(network.encoder_layers, network.decoder_layers)
    for name, indices, count in (
        ("attention_layers", plots.attention_layers, depth),
        ("attention_heads", plots.attention_heads, network.num_heads),
    ):
        if indices and max(indices) >= count:
            raise InputError(f"monitoring.{name}: {max(indices)} does not exist; give numbers up to {count - 1}")


def check_trainer(context: CheckContext) -> None:
    """Check that the machine can train as the recipe asks for: what Lightning and torch.compile refuse."""
    import torch

    from pipeline.runtime.console import quiet_lightning
    from pipeline.runtime.devices import gpus_mistake
    from pipeline.training.compilation import should_compile
    from pipeline.training.trainer import complete_options, make_trainer

    recipe, job = context.recipe, context.job
    quiet_lightning()
    options = complete_options(recipe.trainer, job, recipe.run.timeout_seconds)
    if job is not None and options["accelerator"] != "cpu":
        visible = torch.cuda.device_count()
        mistake = gpus_mistake(job, visible, os.environ.get("SLURM_GPUS_ON_NODE"))
        if mistake and visible < job.tasks_per_node:  # Lightning would name a setting that the job has made.
            raise InputError(mistake)
    with warnings.catch_warnings(action="ignore"):  # They are shown when training starts.
        make_trainer(options, job, logger=False)
    if recipe.run.compile:
        should_compile(recipe.run.compile, options["accelerator"])


def check_kernels(context: CheckContext) -> str | None:
    """Check that the machine can run the kernels that the recipe asks for."""
    from pipeline.training.kernels import choose_kernels
    from pipeline.training.trainer import complete_options

    recipe = context.recipe
    if recipe.run.kernels is None:
        return None  # Nothing can be wrong; the choice is made, and said, when training starts.
    options = complete_options(recipe.trainer, context.job, recipe.run.timeout_seconds)
    choose_kernels(recipe.run.kernels, options, recipe.network)
    return None


def check_run_folder(context: CheckContext) -> str:
    """Check that the run folder is one, or can be created, and that no other process is writing to it."""
    from pipeline.checkpointing.run_folder import check_writable, in_use_error, is_in_use

    run = context.recipe.run_folder()
    check_writable(run)
    if context.job is None and is_in_use(run):
        raise in_use_error(run)  # A requeued job waits for its predecessor to end.
    return f"run folder {run}"


def check_initial_state(context: CheckContext) -> str | None:
    """Check the run that would be resumed, or else the weights that a new run would start from."""
    from data_module.corpus.manifest import is_corpus, read_manifest
    from pipeline.checkpointing.run_folder import check_same_run, is_in_use, latest_valid
    from pipeline.training.init_from import load_initial_weights
    from pipeline.training.start import check_same_vocabulary, should_reset

    recipe = context.recipe
    run, corpus = recipe.run_folder(), recipe.corpus_folder()
    if is_in_use(run):
        return None  # Its checkpoints may be removed while they are read.
    checkpoint = None if should_reset(context.reset, run, context.job) else latest_valid(run)[0]
    if checkpoint is not None:
        check_same_run(run, recipe)
        if is_corpus(corpus):
            from pipeline.checkpointing.checkpoint import read_checkpoint, tokenizer_of  # imports torch

            sha256 = read_manifest(corpus)["tokenizer"]["sha256"]
            check_same_vocabulary(recipe, sha256, tokenizer_of(read_checkpoint(checkpoint)))
    elif context.init_from:
        return f"starts from the weights of {load_initial_weights(context.init_from, recipe).path}"
    return None


def check_corpus(context: CheckContext) -> None:
    """Check the prepared corpus, or, before it is prepared, its settings and folder, and that its texts are there.

    No text is read. `doctor` checks the same and more, with a line for each text.
    """
    from data_module.corpus.checks import check_folder, check_settings
    from data_module.corpus.preparation import existing_corpus
    from data_module.readers.pairs import open_reader

    settings = context.recipe.corpus
    check_settings(settings)
    if existing_corpus(settings, compare_texts=False) is not None:
        return
    check_folder(settings)
    for text in settings.texts():
        for ok, message in open_reader(text, settings).check():
            if not ok:
                raise InputError(message)


def check_bleu_tokenizer(context: CheckContext) -> str:
    """Check that the tokenizer of validation BLEU is installed."""
    from pipeline.checkpointing.run_folder import is_in_use, latest_valid
    from pipeline.inference.bleu_tokenizer import require_tokenizer
    from pipeline.training.start import choose_bleu_tokenizer, should_reset

    run, requested = context.recipe.run_folder(), context.recipe.run.bleu_tokenizer
    is_new = should_reset(context.reset, run, context.job) or is_in_use(run)
    newest = None if is_new else latest_valid(run)[0]
    if requested is not None:
        require_tokenizer(requested, f"run.bleu_tokenizer {requested}")
    began = None
    if newest is not None:
        from pipeline.checkpointing.checkpoint import read_checkpoint  # imports torch
        from pipeline.monitoring.validation_samples import bleu_tokenizer_of  # imports Lightning

        began = bleu_tokenizer_of(read_checkpoint(newest))
    tokenizer, note = choose_bleu_tokenizer(context.recipe, began)
    return note or f"validation BLEU on {tokenizer} tokens"


CHECKS: tuple[Callable[[CheckContext], str | None], ...] = (
    check_training,
    check_run_folder,
    check_initial_state,
    check_corpus,
    check_trainer,
    check_kernels,
    check_bleu_tokenizer,
)
"""Each raises InputError with what is wrong and what to do, or returns what it found, if that is worth a line.

The last ones import torch and Lightning, which takes time.
"""


def cpu_devices_warning(context: CheckContext) -> str | None:
    """Return a warning if several devices were asked for and would be CPU processes, because there is no GPU."""
    options = {"accelerator": "auto", "devices": "auto", **context.recipe.trainer}
    if context.job is not None or options["accelerator"] != "auto" or options["devices"] in ("auto", -1, "-1", 1, "1"):
        return None
    import torch

    from pipeline.training.trainer import device_indices

    try:
        count = len(device_indices(options))
    except InputError:
        return None  # `check_trainer` reports it.
    if torch.cuda.is_available() or count < 2:
        return None
    return (
        f"trainer.devices {options['devices']}: torch finds no GPU, so {count} processes share the CPU; one process"
        " uses all its cores: remove the key, or check nvidia-smi if there should be GPUs"
    )
