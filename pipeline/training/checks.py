"""Checks of the machine and of what `fit` is asked to do: `doctor` prints all of them, `fit` raises the quick ones.

`fit` runs its checks before it prepares a corpus.
"""

import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from data_module.errors import InputError
from data_module.files import existing_parent
from model.settings import DECAY_TO_LAST_STEP

if TYPE_CHECKING:
    from data_module.corpus.checks import SourceCheck
    from data_module.settings import CorpusSettings, TextSource
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
    from pipeline.training.start import check_same_vocabulary, load_initial_weights, should_reset

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


class CheckResult(NamedTuple):
    """What one check found."""

    ok: bool
    message: str
    """What was checked if `ok`; otherwise what is wrong and what to do."""
    where: str = ""
    """Node and rank, if the result holds for that rank only."""
    is_warning: bool = False
    """Whether the message names a likely mistake, which does not fail the check."""


def check_machine(job: "JobStep | None" = None) -> Iterator[CheckResult]:
    """Run all checks of the machine; `job` is the SLURM job step of this process, None outside a job."""
    for check in (check_python, check_packages, check_devices, check_min_nodes):
        yield from check(job)


def check_python(job: "JobStep | None") -> Iterator[CheckResult]:
    """Check the version of Python."""
    python = sys.version_info
    yield CheckResult((3, 11) <= python[:2] < (3, 14), f"Python {python.major}.{python.minor} (needs 3.11 to 3.13)")


def check_packages(job: "JobStep | None") -> Iterator[CheckResult]:
    """Check the versions of torch and Lightning."""
    from importlib.metadata import version

    import torch

    supported = (2, 11) <= _version_numbers(torch.__version__)[:2] <= (2, 13)
    yield CheckResult(supported, f"torch {torch.__version__} (needs 2.11 to 2.13)")
    lightning = version("lightning")
    safe = _version_numbers(lightning) >= (2, 6, 6)
    yield CheckResult(safe, f"lightning {lightning}" + ("" if safe else " is unsafe; install lightning>=2.6.6"))


def check_devices(job: "JobStep | None") -> Iterator[CheckResult]:
    """List the devices; in a job, check that each task has one GPU."""
    import torch

    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            memory = torch.cuda.get_device_properties(index).total_memory / 2**30
            yield CheckResult(True, f"GPU {index}: {torch.cuda.get_device_name(index)}, {memory:.0f} GiB")
    else:
        from pipeline.runtime.devices import best_precision

        count = torch.cuda.device_count()  # as the driver reports it
        gpus = f"{count} GPUs that torch cannot use" if count else "no GPU"
        yield CheckResult(True, f"{gpus}; {os.cpu_count()} CPU cores, default precision {best_precision('cpu')}")
    if job is not None:
        visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
        yield from check_gpus_per_task(job, visible, os.environ.get("SLURM_GPUS_ON_NODE"))


def check_gpus_per_task(job: "JobStep", visible: int, allocated: str | None) -> Iterator[CheckResult]:
    """Check that torch sees all GPUs of the node that SLURM allocated, and that there is one per task.

    Args:
        job: the SLURM job step of this process.
        visible: number of GPUs that torch sees.
        allocated: SLURM_GPUS_ON_NODE, if it is set.
    """
    from pipeline.runtime.devices import gpus_mistake

    if mistake := gpus_mistake(job, visible, allocated):
        yield CheckResult(False, mistake)


def check_min_nodes(job: "JobStep | None") -> Iterator[CheckResult]:
    """Check the number of nodes that the job script needs to go on after a failure."""
    from pipeline.runtime.launch import min_nodes_mistake

    if job is not None and (mistake := min_nodes_mistake(job)):
        yield CheckResult(False, mistake)


def _version_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:3] if part.isdigit())


def check_recipe(context: CheckContext) -> Iterator[CheckResult]:
    """Run the checks that `fit` runs before it trains, and those that only `doctor` has."""
    for check in (check for check in CHECKS if check is not check_corpus):
        yield from result_of(context.recipe, partial(check, context))
    if warning := cpu_devices_warning(context):
        yield CheckResult(True, warning, is_warning=True)
    # The other ranks of a job would wait too long for text to be read, and `fit` reads it next.
    is_quick = context.job is not None and context.job.num_tasks > 1
    yield from check_texts(context.recipe, is_quick, context.init_from is None)
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


def check_texts(recipe: "Recipe", is_quick: bool, learns: bool) -> Iterator[CheckResult]:
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
