"""Checks of the machine, and of whether it can train as a recipe asks."""

import os
import platform
import shutil
import warnings
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version

import torch
from packaging.version import Version

from data_module.corpus.checks import check_settings
from data_module.corpus.manifest import is_corpus
from data_module.errors import InputError
from data_module.system.files import existing_parent
from data_module.system.worker_processes import num_processors, require_shared_memory
from data_module.tokenization.tokenizer import TOKENIZER_NAME, Tokenizer
from model.backend import Backend
from model.optimization import build_schedule
from model.transformer import Transformer
from pipeline.checkpointing.run_folder import checkpoint_bytes, max_checkpoints
from pipeline.config.recipe import Recipe
from pipeline.doctor.recipe_checks import CheckResult, Report
from pipeline.metrics.bleu_tokenizer import require_tokenizer
from pipeline.metrics.metrics import mode_of
from pipeline.ranks.rendezvous import check_loopback
from pipeline.runtime.backend_choice import choose_backend, flash_obstacle, should_compile, try_gpu
from pipeline.runtime.console import quiet_lightning
from pipeline.runtime.devices import best_precision, device_indices, gpus_mistake, processors_note
from pipeline.runtime.launch import JobStep
from pipeline.training.build import build_data, refuse_optimizer
from pipeline.training.out_of_memory import memory_of_weights
from pipeline.training.start import Plan, choose_bleu_tokenizer
from pipeline.training.trainer import make_trainer, trainer_options, waits_for_ranks

SUPPORTED = {"Python": ("3.11", "3.14"), "torch": ("2.11", "2.14"), "lightning": ("2.6.6", "2.7")}
"""The first supported version of each, and the first later one that is not supported."""


def check_machine(job: JobStep | None = None) -> Iterator[CheckResult]:
    """Check versions and devices; in a job step, also its GPUs."""
    for name, (first, end) in SUPPORTED.items():
        found = platform.python_version() if name == "Python" else version(name)
        # A vendor's build may call itself 2.11.0a0+..., which is before 2.11.
        fits = Version(first) <= Version(Version(found).base_version) < Version(end)
        yield CheckResult(fits, f"{name} {found} (needs {first} or later, below {end})")
    count = torch.cuda.device_count()  # as the driver reports it
    visible = count if torch.cuda.is_available() else 0
    for index in range(visible):
        memory = torch.cuda.get_device_properties(index).total_memory / 2**30
        yield CheckResult(True, f"GPU {index}: {torch.cuda.get_device_name(index)}, {memory:.0f} GiB")
    if not visible:
        gpus = f"{count} GPUs that torch cannot use" if count else "no GPU"
        usable = f"{num_processors()} usable of " if num_processors() != os.cpu_count() else ""
        yield CheckResult(
            True, f"{gpus}; {usable}{os.cpu_count()} CPU cores, default precision {best_precision('cpu')}"
        )
    if (note := processors_note(job)) is not None:
        yield CheckResult(True, note, is_warning=True)
    if job is not None and (mistake := gpus_mistake(job, visible)) is not None:
        yield CheckResult(False, mistake)


def check_start(plan: Plan, report: Report) -> None:
    """Check that the machine can train as the plan asks, and that a prepared corpus fits the limits of batches."""
    recipe = plan.recipe
    if plan.initial is not None:
        report.ok(f"starts from the weights of {plan.initial.path}")
    with report.part():
        mode_of(recipe.run.best_by)  # It has to be registered.
    with report.part():
        check_trainer(recipe, plan.job, report)
    with report.part():
        check_memory(plan)
        refuse_optimizer(recipe)
    note_long_warmup(recipe, report)
    with report.part():
        if (requested := recipe.run.bleu_tokenizer) is not None:
            require_tokenizer(requested, f"run.bleu_tokenizer {requested}")
        tokenizer, note = choose_bleu_tokenizer(recipe, plan.resume)
        report.ok(note or f"validation BLEU on {tokenizer} tokens")
    with report.part():
        folder = recipe.corpus_folder()
        if is_corpus(folder):
            build_data(recipe, Tokenizer.load(folder / TOKENIZER_NAME), Backend())


def note_long_warmup(recipe: Recipe, report: Report) -> None:
    """Note a learning rate that rises until the last step: the warm-up is made for a longer run."""
    training, last = recipe.training, recipe.trainer["max_steps"]
    rate = build_schedule(training, recipe.network.d_model, last)
    # Not all steps of a long run: enough to see an earlier peak, also that of a schedule with many of them.
    earlier = {*range(1, last, max(1, last // 1000)), *range(max(1, last - 1000), last)}
    if earlier and max(map(rate, earlier)) < rate(last):
        report.note(
            f"training.schedule {training.schedule}: the learning rate rises until the last step "
            f"(training.warmup_steps {training.warmup_steps}, trainer.max_steps {last}), so the model will be poor: "
            f"give a shorter warm-up, such as --training.warmup_steps {max(1, last // 10)}, or train for longer"
        )


def check_memory(plan: Plan) -> None:
    """Raise InputError if the network with its gradients and moments does not fit into memory: the process is killed.

    How large a micro-batch may be beside them is found out when training starts.
    """
    recipe = plan.recipe
    check_settings(recipe.corpus)  # A network cannot have a negative number of pieces.
    vocabulary_size = plan.tokenizer.vocabulary_size if plan.tokenizer else recipe.corpus.vocabulary_size
    if plan.tokenizer is None and recipe.corpus.tokenizer is not None:
        vocabulary_size = 1  # That of another model, which is not read here.
    options = trainer_options(recipe.trainer, plan.job, recipe.run.timeout_seconds)
    fits, weights = memory_of_weights(recipe, vocabulary_size, options)
    if not fits:
        raise InputError(f"network: {weights}; ask for more memory, or train a smaller network")


def check_trainer(recipe: Recipe, job: JobStep | None, report: Report) -> None:
    """Check that the machine can train as the recipe asks: Lightning's options, kernels and compilation."""
    if recipe.batches.workers:
        require_shared_memory()
    quiet_lightning()
    options = trainer_options(recipe.trainer, job, recipe.run.timeout_seconds)
    if job is not None and options["accelerator"] != "cpu":
        visible = torch.cuda.device_count()
        mistake = gpus_mistake(job, visible)
        if mistake and visible < job.tasks_per_node:  # Lightning would name a setting that follows from the job.
            raise InputError(mistake)
    with warnings.catch_warnings(action="ignore"):  # Lightning shows its warnings when training starts.
        trainer = make_trainer(options, job, logger=False)
    if note := waits_for_ranks(getattr(trainer.strategy, "cluster_environment", None)):
        report.note(note)
    asked, count = recipe.trainer.get("accelerator", "auto"), len(device_indices(options))
    if job is None and count > 1:
        check_loopback()
    if job is None and asked == "auto" and options["accelerator"] == "cpu" and count > 1:
        report.note(
            f"trainer.devices {recipe.trainer['devices']}: torch finds no GPU, so {count} processes share the CPU; one"
            " process uses all its cores: remove the key, or check nvidia-smi if there should be GPUs"
        )
    # Nothing else can be wrong. The complete choice takes time, and is made and printed when training starts.
    should_compile(recipe.run.compile, options, flash_obstacle(options, recipe.network) is not None, [])


def check_backend(recipe: Recipe, job: JobStep | None, report: Report) -> None:
    """Choose this process's backend, which may have to compile programs, and describe it."""
    options = trainer_options(recipe.trainer, job, recipe.run.timeout_seconds)
    backend = choose_backend(recipe.run.kernels, recipe.run.compile, options, recipe.network)
    report.ok(backend.line())
    for note in backend.notes:
        report.note(note)
    try_gpu(backend, options)


def check_disk_space(recipe: Recipe, report: Report) -> None:
    """Check that the run folder's disk has room for all checkpoints of the run, including those that exist already."""
    check_settings(recipe.corpus)  # A network cannot have a negative number of pieces.
    run = recipe.run_folder()
    with torch.device("meta"):
        parameters = Transformer(recipe.corpus.vocabulary_size, recipe.network).parameters()
    free = shutil.disk_usage(existing_parent(run)).free
    for path in (run / "checkpoints").rglob("*.ckpt"):
        with suppress(FileNotFoundError):  # Another process may be writing to the run folder.
            free += path.stat().st_size
    size = checkpoint_bytes(sum(parameter.nbytes for parameter in parameters), recipe.training.ema_decay is not None)
    needed = size * (max_checkpoints(recipe.run.keep_last) + 1)  # One more while it is written.
    hint = "" if free > needed else "; lower run.keep_last or set another run.folder"
    message = f"{free / 2**30:.1f} GiB free for checkpoints, which need {needed / 2**30:.1f} GiB{hint}"
    report.add(CheckResult(free > needed, message))
