"""The story of a run: plan, check, corpus, module, data, callbacks, train.

torch and Lightning take seconds to import; `recipe_checks.py` has the checks before them. `Trainer.fit` then calls on
every rank, callbacks in the order of `build_callbacks`:

- at the start: `TranslationDataModule.setup`, `TranslationModule.configure_optimizers`, `load_state_dict` of whatever a
  checkpoint has a state of, `on_train_start` of the callbacks;
- in a step: `StatefulLoader` for the rank's part of the batch; `TranslationModule.training_step`, which also takes the
  optimizer's step; `on_train_batch_end` of the callbacks, which log, average the weights, save and stop;
- in a validation, after a step has ended: `validation_step` and `on_validation_batch_end` for each batch,
  `on_validation_epoch_end`, and `on_validation_end`, where the best checkpoint is saved;
- in a save: `state_dict` of loader and callbacks, `on_save_checkpoint` of module and callbacks; then
  `AtomicCheckpointIO` writes the file in the background;
- at a stop: `GracefulStop`, after the step in which all ranks know of it, saves and raises `Stopped`; `on_exception` of
  the callbacks.
"""

import secrets
from contextlib import ExitStack
from pathlib import Path

import torch

from data_module.corpus.manifest import corpus_tokenizer
from data_module.corpus.preparation import in_use
from data_module.errors import SCRIPTS
from pipeline.checkpointing.checkpoint import NO_IDENTITY, Identity
from pipeline.checkpointing.run_folder import RunFolder
from pipeline.config.recipe import Recipe
from pipeline.doctor.recipe_checks import Report
from pipeline.doctor.start_checks import check_start, check_trainer
from pipeline.runtime import signals
from pipeline.runtime.backend_choice import choose_backend, try_gpu
from pipeline.runtime.console import say
from pipeline.runtime.devices import allow_tf32
from pipeline.runtime.launch import current_job_step
from pipeline.training.build import build_callbacks, build_data, build_module, build_trainer
from pipeline.training.graceful_stop import rank_failures_in_one_line
from pipeline.training.new_corpus import ensure_corpus
from pipeline.training.out_of_memory import memory_failures_in_one_line
from pipeline.training.start import Start, check_pairs, check_vocabulary, finished_reason, plan_start
from pipeline.training.trainer import trainer_options


def fit(recipe: Recipe, folder: RunFolder | None, fresh: bool, init_from: Path | None) -> None:
    """Prepare the corpus if necessary, then start the recipe's run or resume it, unless nothing is left to train.

    `folder` is the locked run folder on rank 0, None on other ranks. `fresh` removes an existing run from it.
    `init_from` is a checkpoint, run folder or Marian model whose weights and tokenizer a new run takes over.

    Raises InputError for a user's mistake, Stopped when a signal or `trainer.max_time` stopped the run.
    """
    plan = plan_start(recipe, current_job_step(), fresh, init_from)
    run_folder, corpus, resume = plan.recipe.run_folder(), plan.recipe.corpus_folder(), plan.resume
    if folder is not None:  # One rank checks, so that a mistake is reported once; its exit code ends the others.
        check_start(plan, Report())
    elif plan.job is None:
        # Left-over variables of another job may have made this process another rank than 0. Then no rank would check.
        check_trainer(plan.recipe, None, Report())
    manifest = ensure_corpus(plan.recipe.corpus, plan.tokenizer)
    if plan.tokenizer is not None:
        # Another process may have prepared the corpus since the plan was made.
        check_vocabulary(plan.recipe, plan.tokenizer, "what this run continues")
    # A new run from other weights keeps the list of pieces that their training has seen.
    tokenizer = resume.tokenizer if resume else corpus_tokenizer(corpus).also_seen(plan.tokenizer)
    identity = NO_IDENTITY
    with ExitStack() as stack:
        if folder is not None:
            stack.enter_context(in_use(corpus))
            identity = Identity(plan.run_id or secrets.token_hex(16), check_pairs(plan))
        for note in plan.notes:
            say(note)
        if resume is not None:
            if reason := finished_reason(plan.recipe, run_folder, resume.step):
                say(f"{run_folder}: {reason}, or use --fresh")
                return
            say(f"resuming from {resume.path}")
        elif plan.initial is not None:
            say(f"starting from the weights and the tokenizer of {plan.initial.path}")
        train(Start(plan, folder, tokenizer, manifest, identity))
        say(f"the run is in {run_folder}; view it with: {SCRIPTS}tensorboard --logdir {run_folder}")


def train(start: Start) -> None:
    """Train until `trainer.max_steps`, early stopping, or a request to stop.

    Nothing in the run folder changes before everything that can be wrong has been checked, memory included.
    """
    plan, recipe = start.plan, start.plan.recipe
    options = trainer_options(recipe.trainer, plan.job, recipe.run.timeout_seconds)
    allow_tf32(options)
    backend = choose_backend(recipe.run.kernels, recipe.run.compile, options, recipe.network)
    for line in (*backend.notes, backend.line()):
        say(line)
    with memory_failures_in_one_line(recipe, start.tokenizer.vocabulary_size, options):
        with signals.not_recorded():  # This can take minutes and loses nothing.
            try_gpu(backend, options)
            module = build_module(recipe, start.tokenizer, backend)
        if plan.initial is not None:
            module.network.load_state_dict(plan.initial.weights)
        data = build_data(recipe, start.tokenizer, backend)
        if text_sources := data.validation_sources():
            module.report_sources(text_sources.names, torch.from_numpy(text_sources.of_pair))
        trainer = build_trainer(start, options, build_callbacks(start, data, backend))
        with signals.keyboard_interrupt_recorded(), rank_failures_in_one_line():
            path = plan.resume.path if plan.resume else None
            trainer.fit(module, datamodule=data, ckpt_path=path, weights_only=True)
