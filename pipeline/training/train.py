"""`fit` after its first checks: plan, corpus, backend, module, data, callbacks, Trainer, training."""

import re
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from data_module.corpus.manifest import Manifest, corpus_tokenizer
from data_module.corpus.preparation import existing_corpus, in_use
from data_module.errors import SCRIPTS
from data_module.settings import CorpusSettings
from data_module.tokenization.tokenizer import Tokenizer
from pipeline.checkpointing.checkpoint import NO_IDENTITY, Identity
from pipeline.checkpointing.run_folder import RunFolder, count_start, latest_valid, step_of
from pipeline.config.recipe import Recipe
from pipeline.runtime import signals
from pipeline.runtime.backend import choose_backend
from pipeline.runtime.compiled_code import start_compiler
from pipeline.runtime.console import Failure, lacking_memory, say
from pipeline.runtime.devices import TrainerOptions, allow_tf32
from pipeline.runtime.launch import node_name, process_rank
from pipeline.training.build import build_callbacks, build_data, build_module, build_trainer
from pipeline.training.checks import check_start, check_trainer, memory_of_weights
from pipeline.training.graceful_stop import known_failures_in_one_line
from pipeline.training.new_corpus import prepare_and_report
from pipeline.training.recipe_checks import Report
from pipeline.training.start import Plan, Start, check_pairs, check_vocabulary, finished_reason
from pipeline.training.trainer import trainer_options


def follow(plan: Plan, folder: RunFolder | None) -> None:
    """Follow a plan: prepare the corpus if it does not exist, then train, unless nothing is left to train.

    `folder` is the locked run folder on rank 0, None on other ranks.
    """
    run, corpus, resume = plan.recipe.run_folder(), plan.recipe.corpus_folder(), plan.resume
    if folder is not None:  # One rank checks, so that a mistake is reported once; its exit code ends the others.
        check_start(plan, Report())
    elif plan.job is None:  # Left-over variables may say that this is another rank than 0, which would be silent.
        check_trainer(plan.recipe, None, Report())
    manifest = ensure_corpus(plan.recipe.corpus, plan.tokenizer)
    if plan.tokenizer is not None:
        # Another process may have prepared the corpus since the plan was made.
        check_vocabulary(plan.recipe, plan.tokenizer, "what this run continues")
    tokenizer = resume.tokenizer if resume else corpus_tokenizer(corpus).also_seen(plan.tokenizer)
    identity = NO_IDENTITY
    with ExitStack() as stack:
        if folder is not None:
            stack.enter_context(in_use(corpus))
            identity = Identity(plan.run_id or secrets.token_hex(16), check_pairs(plan))
        for note in plan.notes:
            say(note)
        if plan.job is not None and folder is not None:
            stack.enter_context(count_start(folder.path, plan.job, resume.path if resume else None))
        if resume is not None:
            if reason := finished_reason(plan.recipe, run, resume.step):
                say(f"{run}: {reason}, or use --fresh")
                return
            say(f"resuming from {resume.path}")
        elif plan.initial is not None:
            say(f"starting from the weights and the tokenizer of {plan.initial.path}")
        train(Start(plan, folder, tokenizer, manifest, identity))
        say(f"the run is in {run}; view it with: {SCRIPTS}tensorboard --logdir {run}")


def ensure_corpus(settings: CorpusSettings, tokenizer: Tokenizer | None = None) -> Manifest:
    """Prepare the corpus if it does not exist, else check it against the settings; return its manifest.

    Of several ranks, one prepares the corpus and the others wait. Only rank 0 reads the texts again, where they are
    available, to see that they are unchanged.

    While a corpus is being prepared, a stop signal ends every rank at once. Otherwise no rank ends by itself, because
    the others would wait for it: they agree on stopping when training starts.

    Raises InputError as `prepare` does.
    """
    manifest = existing_corpus(settings, compare_texts=process_rank() == 0)
    if manifest is not None:
        say(f"{settings.folder} is up to date")
        return manifest
    with signals.default_signals():
        return prepare_and_report(settings, tokenizer)


def train(start: Start) -> None:
    """Train until `trainer.max_steps`, early stopping, or a request to stop.

    Nothing in the run folder changes before everything that can be wrong has been checked, memory included.
    """
    plan, recipe = start.plan, start.plan.recipe
    options = trainer_options(recipe.trainer, plan.job, recipe.run.timeout_seconds)
    allow_tf32(options)
    run = recipe.run
    backend = choose_backend(run.kernels, run.compile, options, recipe.network)
    for line in (*backend.notes, backend.line()):
        say(line)
    with naming_failures(recipe, start.tokenizer.vocabulary_size, options):
        with signals.not_recorded():  # This can take minutes and loses nothing.
            module = build_module(recipe, start.tokenizer, backend)
        if plan.initial is not None:
            module.network.load_state_dict(plan.initial.weights)
        if backend.compiled and torch.cuda.is_available():
            start_compiler()
        data = build_data(recipe, start.tokenizer, backend)
        if text_sources := data.validation_sources():
            module.report_sources(text_sources.names, torch.from_numpy(text_sources.of_pair))
        trainer = build_trainer(start, options, build_callbacks(start, data, backend))
        with signals.keyboard_interrupt_recorded(), known_failures_in_one_line():
            path = plan.resume.path if plan.resume else None
            trainer.fit(module, datamodule=data, ckpt_path=path, weights_only=True)


@contextmanager
def naming_failures(recipe: Recipe, vocabulary_size: int, options: TrainerOptions) -> Iterator[None]:
    """Raise Failure with a line for the user where memory runs out or a loader process is killed."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        batches, lacking = recipe.batches, lacking_memory(error)
        # PyTorch raises it from a signal handler, in whatever the main thread does.
        killed = re.search(r"DataLoader worker.* ((?:is|are) killed by signal: [^.]+|exited unexpectedly)", str(error))
        if killed is not None:
            problem = (
                f"a loader process (batches.workers {batches.workers}) {killed[1]}, as when memory runs out; ask for "
                "more memory, or lower batches.workers"
            )
        elif lacking is not None:
            micro_batch = batches.max_tokens_per_device or batches.batch_tokens
            # Those of validation are smaller.
            fewer = max(recipe.corpus.max_tokens + 1, min(batches.batch_tokens // 8, micro_batch) // 2)
            _, weights = memory_of_weights(recipe, vocabulary_size, options)
            problem = (
                f"out of memory ({lacking}): {weights}; ask for more memory, train a smaller network, or set "
                f"batches.max_tokens_per_device to {fewer} or less"
            )
        else:
            raise
        rank = f"rank {process_rank()} on {node_name()}: " if process_rank() else ""
        newest, _ = latest_valid(recipe.run_folder())
        resumes = f"resumes from step {step_of(newest)}" if newest else "begins again, since no checkpoint was written"
        raise Failure(f"{rank}{problem}; the run {resumes}") from None
