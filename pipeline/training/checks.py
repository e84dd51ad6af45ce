"""Checks of the machine and of what `fit` is asked to do: `doctor` prints them, `fit` refuses what they find.

`fit` runs its checks before it touches a corpus. What they check takes no long reading; torch and Lightning, which take
seconds to import, are needed by the last ones only.
"""

import os
import platform
import shutil
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from data_module.errors import InputError
from data_module.files import existing_parent
from model.settings import DECAY_TO_LAST_STEP
from pipeline.runtime.console import quiet_lightning, say

if TYPE_CHECKING:
    from data_module.corpus.checks import TextChecker
    from data_module.settings import TextSource
    from data_module.tokenization.tokenizer import Tokenizer
    from pipeline.config.recipe import Recipe
    from pipeline.runtime.launch import JobStep


SUPPORTED = {"Python": ("3.11", "3.14"), "torch": ("2.11", "2.14"), "lightning": ("2.6.6", "2.7")}
"""The first version of each that serves, and the first one that does not."""


class CheckResult(NamedTuple):
    """What one check found."""

    ok: bool
    message: str
    """What was checked if `ok`; otherwise what is wrong and what to do."""
    where: str = ""
    """Node and rank, if the result holds for that rank only."""
    is_warning: bool = False
    """Whether the message names a likely mistake, which does not fail the check."""


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
    for_doctor: bool = False
    """Whether `doctor` asks, which reads the texts."""

    def is_in_use(self) -> bool:
        """Return whether a process writes to the run folder. Checkpoints may then be removed while they are read."""
        from pipeline.checkpointing.run_folder import is_in_use

        return is_in_use(self.recipe.run_folder())

    def checkpoint(self) -> Path | None:
        """Return the checkpoint that the run would be resumed from; None for a new run."""
        from pipeline.checkpointing.run_folder import latest_valid
        from pipeline.training.start import should_reset

        run = self.recipe.run_folder()
        return None if should_reset(self.reset, run, self.job) else latest_valid(run)[0]

    def earlier_tokenizer(self) -> "Tokenizer | None":
        """Return the tokenizer of the run that would be resumed or that a new run would start from, if there is one.

        Raises InputError as `load_initial_weights` does.
        """
        from pipeline.training.start import load_initial_weights

        if (checkpoint := self.checkpoint()) is not None:
            from pipeline.checkpointing.checkpoint import read_checkpoint, stored_tokenizer  # imports torch

            return stored_tokenizer(checkpoint, read_checkpoint(checkpoint))
        return load_initial_weights(self.init_from, self.recipe).tokenizer if self.init_from else None


def refuse_mistakes(context: CheckContext) -> None:
    """Raise InputError for the first mistake that a check of `fit` finds; print likely mistakes."""
    for check in CHECKS:
        for result in check(context):
            if not result.ok:
                raise InputError(result.message)
            if result.is_warning:
                say(result.message)


def check_recipe(context: CheckContext) -> Iterator[CheckResult]:
    """Run all checks of a recipe for `doctor`, each whatever the others find."""
    context = replace(context, for_doctor=True)
    for check in (*CHECKS, check_limits, check_disk_space):
        try:
            with context.recipe.naming_places():
                yield from check(context)
        except InputError as error:
            yield CheckResult(False, str(error))


def check_machine(job: "JobStep | None" = None) -> Iterator[CheckResult]:
    """Check versions and devices, and in a job, whose step is given, its GPUs and its number of nodes."""
    from importlib.metadata import version

    import torch
    from packaging.version import Version

    from data_module.worker_processes import num_processors
    from pipeline.runtime.devices import (
        ONE_GPU_NOTE,
        best_precision,
        gpus_mistake,
        processors_note,
        sees_own_gpu_only,
    )
    from pipeline.runtime.launch import min_nodes_mistake

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
    if job is not None:
        mistakes = (gpus_mistake(job, visible), min_nodes_mistake(job))
        yield from (CheckResult(False, mistake) for mistake in mistakes if mistake)
        if mistakes[0] is None and sees_own_gpu_only(job, visible):
            yield CheckResult(True, ONE_GPU_NOTE, is_warning=True)


def check_training(context: CheckContext) -> Iterable[CheckResult]:
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
    return ()


def check_run_folder(context: CheckContext) -> Iterable[CheckResult]:
    """Check that the run folder holds a run or can be created, and that no other process is writing to it."""
    from pipeline.checkpointing.run_folder import check_writable, in_use_error
    from pipeline.training.start import should_reset

    run = context.recipe.run_folder()
    check_writable(run, fresh=should_reset(context.reset, run, context.job))
    if context.job is None and context.is_in_use():
        raise in_use_error(run)  # A requeued job waits for its predecessor to end.
    return [CheckResult(True, f"run folder {run}")]


def check_initial_state(context: CheckContext) -> Iterable[CheckResult]:
    """Check the run that would be resumed, or else the weights that a new run would start from."""
    from data_module.corpus.manifest import is_corpus, read_manifest
    from pipeline.checkpointing.run_folder import check_same_run
    from pipeline.training.start import check_same_vocabulary, check_tensors, load_initial_weights

    recipe, corpus = context.recipe, context.recipe.corpus_folder()
    if context.is_in_use():
        return
    if (checkpoint := context.checkpoint()) is not None:
        check_same_run(recipe.run_folder(), recipe)
        from pipeline.checkpointing.checkpoint import read_to_resume, stored_tokenizer  # imports torch

        contents = read_to_resume(checkpoint)
        tokenizer = stored_tokenizer(checkpoint, contents)
        check_tensors(recipe, checkpoint, contents, tokenizer.vocabulary_size)
        if is_corpus(corpus):
            check_same_vocabulary(recipe, read_manifest(corpus)["tokenizer"]["sha256"], tokenizer)
    elif context.init_from:
        initial = load_initial_weights(context.init_from, recipe)
        yield CheckResult(True, f"starts from the weights of {initial.path}")


def check_corpus(context: CheckContext) -> Iterable[CheckResult]:
    """Check the prepared corpus, or, before it is prepared, its settings, its folder and that its texts are there.

    `doctor` also reads the texts, prepared or not, and names likely mistakes in them.
    """
    from data_module.corpus.builder import check_vocabulary_size
    from data_module.corpus.checks import (
        TextChecker,
        check_folder,
        check_settings,
        given_tokenizer,
        size_warnings,
        source_warnings,
    )
    from data_module.corpus.manifest import TOKENIZER_NAME
    from data_module.corpus.pairs import all_available
    from data_module.corpus.preparation import existing_corpus
    from data_module.tokenization.tokenizer import Tokenizer
    from pipeline.inference.pieces import piece_report

    settings = context.recipe.corpus
    # The other ranks of a job would wait too long for text to be read, and `fit` reads it next.
    reads_text = context.for_doctor and (context.job is None or context.job.num_tasks == 1)
    check_settings(settings)
    is_prepared = existing_corpus(settings, compare_texts=reads_text) is not None
    if is_prepared:
        yield CheckResult(True, f"corpus {settings.folder} is prepared")
        if not reads_text or not all_available(settings):
            return
    else:
        check_folder(settings)
        given_tokenizer(settings)
    checker, num_read = TextChecker(settings), 0
    for split, text in checker.sources():
        num_read += yield from check_text(checker, split, text, reads_text)
    if num_read < len(settings.texts()):
        return
    yield from (CheckResult(True, line, is_warning=True) for line in source_warnings(settings, checker))
    tokenizer = None if context.is_in_use() else context.earlier_tokenizer()
    if is_prepared:
        tokenizer = Tokenizer.load(context.recipe.corpus_folder() / TOKENIZER_NAME).also_seen(tokenizer)
    elif (tokenizer := given_tokenizer(settings, tokenizer)) is not None:
        tokenizer = Tokenizer(tokenizer.model)  # What this text adds to the pieces that it has seen is not known.
    # Otherwise the vocabulary, and what the network has learned, come from another run or an earlier start of this one.
    if context.init_from is None and context.checkpoint() is None:
        if tokenizer is None:
            tokenizer = check_vocabulary_size(settings, checker)
        yield from (CheckResult(True, line, is_warning=True) for line in size_warnings(settings, checker))
    if tokenizer is not None:
        yield from (CheckResult(True, line, is_warning=is_note) for line, is_note in piece_report(settings, tokenizer))


def check_text(
    checker: "TextChecker", split: str, text: "TextSource", reads_text: bool
) -> Generator[CheckResult, None, bool]:
    """Check that a text source is there, and read it if `reads_text` and that needs no network.

    Yields results, and returns whether the source was read.
    """
    from data_module.corpus.pairs import open_reader

    try:
        reader = open_reader(text, checker.settings)
        results = [CheckResult(ok, message) for ok, message in reader.check()]
        if reads_text and all(result.ok for result in results) and reader.is_available():
            source = checker.check(split, text)
            yield CheckResult(True, f"text {source.name}: {source.num_pairs:,} pairs")
            return True
    except InputError as error:
        results = [CheckResult(False, str(error))]
    yield from results
    return False


def check_trainer(context: CheckContext) -> Iterator[CheckResult]:
    """Check that the machine can train as the recipe asks for: Lightning's options and the backend."""
    import torch

    from data_module.worker_processes import require_shared_memory
    from pipeline.runtime.backend import flash_takes, should_compile
    from pipeline.runtime.devices import gpus_mistake, num_ranks
    from pipeline.training.trainer import make_trainer, trainer_options

    recipe, job = context.recipe, context.job
    if recipe.batches.workers:
        require_shared_memory()
    quiet_lightning()
    options = trainer_options(recipe.trainer, job, recipe.run.timeout_seconds)
    if job is not None and options["accelerator"] != "cpu":
        visible = torch.cuda.device_count()
        mistake = gpus_mistake(job, visible)
        if mistake and visible < job.tasks_per_node:  # Lightning would name a setting that the job has made.
            raise InputError(mistake)
    with warnings.catch_warnings(action="ignore"):  # They are shown when training starts.
        make_trainer(options, job, logger=False)
    asked = recipe.trainer.get("accelerator", "auto"), recipe.trainer.get("devices", "auto")
    if job is None and asked[0] == "auto" and options["accelerator"] == "cpu" and num_ranks(options) > 1:
        yield CheckResult(
            True,
            f"trainer.devices {asked[1]}: torch finds no GPU, so {num_ranks(options)} processes share the CPU; one"
            " process uses all its cores: remove the key, or check nvidia-smi if there should be GPUs",
            is_warning=True,
        )
    run, is_alone = recipe.run, job is None or job.num_tasks == 1
    if run.kernels == "triton" or (context.for_doctor and is_alone):
        yield from (one for one in check_backend(context) if not one.ok or (context.for_doctor and is_alone))
        return
    # Nothing else can be wrong; the whole choice, which takes time, is made and said when training starts.
    should_compile(run.compile, options, not flash_takes(options, recipe.network), [])


def check_optimizer(context: CheckContext) -> Iterable[CheckResult]:
    """Check that the recipe's network can be trained with its optimizer."""
    from pipeline.training.build import refuse_optimizer

    refuse_optimizer(context.recipe)
    return ()


def check_metric(context: CheckContext) -> Iterable[CheckResult]:
    """Check that the metric that chooses checkpoints is registered."""
    from pipeline.inference.metrics import mode_of

    mode_of(context.recipe.run.best_by)
    return ()


def check_backend(context: CheckContext) -> Iterator[CheckResult]:
    """Choose this process's backend, which may have to compile programs, and describe it."""
    from pipeline.runtime.backend import choose_backend
    from pipeline.training.trainer import trainer_options

    recipe, run = context.recipe, context.recipe.run
    options = trainer_options(recipe.trainer, context.job, run.timeout_seconds)
    try:
        with recipe.naming_places():
            backend = choose_backend(run.kernels, run.compile, options, recipe.network)
    except InputError as error:
        yield CheckResult(False, str(error))
        return
    yield CheckResult(True, backend.line())
    yield from (CheckResult(True, note, is_warning=True) for note in backend.notes)


def check_bleu_tokenizer(context: CheckContext) -> Iterable[CheckResult]:
    """Check that the tokenizer of validation BLEU is installed."""
    from pipeline.inference.bleu_tokenizer import require_tokenizer
    from pipeline.training.start import choose_bleu_tokenizer

    if (requested := context.recipe.run.bleu_tokenizer) is not None:
        require_tokenizer(requested, f"run.bleu_tokenizer {requested}")
    began = None
    if not context.is_in_use() and (checkpoint := context.checkpoint()) is not None:
        from pipeline.checkpointing.checkpoint import read_to_resume  # imports torch
        from pipeline.monitoring.validation_samples import bleu_tokenizer_of  # imports Lightning

        began = bleu_tokenizer_of(read_to_resume(checkpoint))
    tokenizer, note = choose_bleu_tokenizer(context.recipe, began)
    return [CheckResult(True, note or f"validation BLEU on {tokenizer} tokens")]


CHECKS: tuple[Callable[[CheckContext], Iterable[CheckResult]], ...] = (
    check_training,
    check_run_folder,
    check_initial_state,
    check_corpus,
    check_metric,
    check_trainer,
    check_optimizer,
    check_bleu_tokenizer,
)
"""What `fit` and `doctor` check. Each raises InputError with what is wrong and what to do, or yields what it found."""


def check_limits(context: CheckContext) -> Iterable[CheckResult]:
    """Check that a prepared corpus keeps to the recipe's limits, as `fit` does when it opens the corpus."""
    from data_module.corpus.manifest import TOKENIZER_NAME, is_corpus
    from data_module.tokenization.tokenizer import Tokenizer
    from model.backend import Backend
    from pipeline.training.build import build_data

    folder = context.recipe.corpus_folder()
    if is_corpus(folder):
        build_data(context.recipe, Tokenizer.load(folder / TOKENIZER_NAME), Backend())
    return ()


def check_disk_space(context: CheckContext) -> Iterable[CheckResult]:
    """Check that the run folder's disk has room for all checkpoints of the run; those it has already take no more."""
    import torch

    from data_module.corpus.checks import check_settings
    from model.transformer import Transformer
    from pipeline.checkpointing.run_folder import checkpoint_bytes, max_checkpoints

    recipe = context.recipe
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
    return [CheckResult(free > needed, message)]
