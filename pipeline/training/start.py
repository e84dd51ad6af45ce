"""What a start of `fit` finds: the run folder, locked, the checkpoint to resume from, or weights to start from.

Everything that training needs to know is read once, into `Start`, and handed on.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_module.errors import InputError, printable
from data_module.files import json_object
from pipeline.runtime.console import say
from pipeline.runtime.launch import JobStep, process_rank

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from data_module.tokenization.tokenizer import Tokenizer
    from model.settings import NetworkSettings
    from pipeline.checkpointing.run_folder import RunFolder
    from pipeline.config.recipe import Recipe
    from pipeline.inference.bleu_tokenizer import Choice

LOCK_PATIENCE_SECONDS = 120
"""How long a SLURM job waits for another process that writes to its run folder."""
_MAY_DIFFER = ("dropout", "attention_dropout", "activation_dropout")
"""Network settings that affect neither the weights' shapes nor what they compute."""


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run resumes from."""

    path: Path
    step: int
    """Optimizer steps taken."""
    validation_pending: bool
    """Whether the run was stopped during the validation after this step, which then has to be run again."""
    bleu_tokenizer: str
    """The tokenizer of validation BLEU that the run began with."""
    tokenizer: "Tokenizer"
    """That of the corpus, with the pieces that the run and those that it started from have seen."""


@dataclass(frozen=True)
class InitialWeights:
    """What a new run takes over; everything else, such as the schedule, starts from the beginning."""

    path: Path
    tokenizer: "Tokenizer"
    weights: "dict[str, Tensor]"
    """The state dict of `Transformer`; that of a checkpoint is memory-mapped."""
    network: dict[str, Any]
    """The network's settings."""


@dataclass(frozen=True)
class Start:
    """What one start of `fit` knows on every rank."""

    recipe: "Recipe"
    job: JobStep | None
    """The SLURM job step; None outside a job."""
    folder: "RunFolder | None"
    """The locked run folder on rank 0, None on other ranks."""
    reset: bool
    """Remove the run that is in the folder (`--fresh`)."""
    resume: ResumePoint | None
    initial: InitialWeights | None
    """Weights of another run for a new one (`--init-from`)."""
    tokenizer: "Tokenizer"
    manifest: dict[str, Any]
    """The corpus's manifest."""


def should_reset(requested: bool, path: Path, job: JobStep | None) -> bool:
    """Return whether to remove the run in the folder.

    A job that was submitted with `--fresh` does so once: when SLURM requeues it, it resumes.
    """
    from pipeline.checkpointing.run_folder import reset_marker

    return requested and not (job is not None and reset_marker(path, job).exists())


def begin_from(
    recipe: "Recipe", reset: bool, init_from: Path | None
) -> tuple["Recipe", "Tokenizer | None", InitialWeights | None]:
    """Find out what the recipe's run continues: its own checkpoint, or the weights of another run or model.

    Returns:
        The recipe, with settings of the network that came with those weights; the tokenizer that the corpus has to have
        if it is prepared now, None to learn one; and the weights for a new run.
    """
    from data_module.corpus.manifest import is_corpus
    from pipeline.checkpointing.run_folder import inherit_network, latest_valid

    checkpoint = None if reset else latest_valid(recipe.run_folder())[0]
    if checkpoint is None:
        if init_from is None:
            return recipe, None, None
        initial = load_initial_weights(init_from, recipe)
        return recipe.inherit_network(initial.network), initial.tokenizer, initial
    if init_from is not None:
        say(f"{recipe.run_folder()}: resuming this run; --init-from is ignored")
    recipe = inherit_network(recipe.run_folder(), recipe)
    if is_corpus(recipe.corpus_folder()):
        return recipe, None, None
    # A corpus that is prepared anew for the run needs the run's vocabulary.
    from pipeline.checkpointing.checkpoint import read_checkpoint, stored_tokenizer  # imports torch

    return recipe, stored_tokenizer(checkpoint, read_checkpoint(checkpoint)), None


@contextmanager
def open_start(
    recipe: "Recipe", job: JobStep | None, reset: bool, initial: InitialWeights | None, manifest: dict[str, Any]
) -> Iterator[Start]:
    """Lock the run folder and the corpus on rank 0 and find the checkpoint to resume from.

    Inside a job the start is counted on rank 0; see `count_start`.
    """
    from data_module.corpus.preparation import in_use
    from data_module.tokenization.tokenizer import Tokenizer
    from pipeline.checkpointing.run_folder import RunFolder, count_start

    tokenizer = Tokenizer.load(Path(recipe.corpus.folder) / "tokenizer.model")
    with ExitStack() as stack:
        folder = None
        if process_rank() == 0:
            # A requeued job may find its predecessor still writing: that process ends, or its lock is released.
            folder = RunFolder(recipe.run_folder(), patience_seconds=LOCK_PATIENCE_SECONDS if job else 0)
            stack.callback(folder.close)
            stack.enter_context(in_use(recipe.corpus_folder()))
        resume = None if reset else find_resume_point(recipe, tokenizer, checked=folder is not None)
        if job is not None and folder is not None:
            stack.enter_context(count_start(folder.path, job, resume.path if resume else None))
        tokenizer = resume.tokenizer if resume else tokenizer.also_seen(initial.tokenizer if initial else None)
        yield Start(recipe, job, folder, reset, resume, initial if resume is None else None, tokenizer, manifest)


def choose_bleu_tokenizer(recipe: "Recipe", began: str | None) -> "Choice":
    """Return the tokenizer of validation BLEU: the one that the run began with, or, if None, that of a new run.

    Raises InputError when packages of the tokenizer are not installed.
    """
    from pipeline.inference.bleu_tokenizer import choose_tokenizer, resume_tokenizer

    requested, language = recipe.run.bleu_tokenizer, recipe.corpus.target_language
    return choose_tokenizer(requested, language) if began is None else resume_tokenizer(began, requested, language)


def check_same_vocabulary(recipe: "Recipe", corpus_sha256: str, run_tokenizer: "Tokenizer") -> None:
    """Raise InputError if the corpus has another tokenizer than the run that would be resumed.

    Args:
        recipe: the recipe.
        corpus_sha256: SHA-256 of the corpus's tokenizer.
        run_tokenizer: the tokenizer in the run's checkpoint.
    """
    if run_tokenizer.sha256 != corpus_sha256:
        raise InputError(
            f"{recipe.corpus.folder}: has another vocabulary than the run in {recipe.run_folder()}; name another "
            "corpus.folder, which fit then prepares with the run's vocabulary, or give another run.folder"
        )


def find_resume_point(recipe: "Recipe", tokenizer: "Tokenizer", checked: bool) -> ResumePoint | None:
    """Return the newest valid checkpoint of the recipe's run, None if there is none.

    With `checked`, report what has changed since the last start and raise InputError where that is not allowed.
    """
    from pipeline.checkpointing.run_folder import check_same_run, latest_valid, step_of

    path = recipe.run_folder()
    checkpoint, damaged = latest_valid(path)
    if checked:
        for other in damaged:
            print(f"{other}: is incomplete; skipped", file=sys.stderr)
    if checkpoint is None:
        return None
    if checked:
        allowed = check_same_run(path, recipe)
    # Imported here because torch and Lightning take seconds, and another recipe's run is refused before that.
    from pipeline.checkpointing.checkpoint import read_to_resume, stored_tokenizer
    from pipeline.monitoring.validation_samples import bleu_tokenizer_of
    from pipeline.training.graceful_stop import validation_is_pending

    contents = read_to_resume(checkpoint)
    run_tokenizer = stored_tokenizer(checkpoint, contents)
    if checked:
        check_same_vocabulary(recipe, tokenizer.sha256, run_tokenizer)
        check_tensors(recipe, checkpoint, contents, tokenizer.vocabulary_size)
        for change in allowed:
            print(printable(f"changed since the last start: {change}"), file=sys.stderr)
    pending, tokenized = validation_is_pending(contents), bleu_tokenizer_of(contents)
    return ResumePoint(checkpoint, step_of(checkpoint), pending, tokenized, run_tokenizer)


def check_tensors(recipe: "Recipe", path: Path, contents: dict[str, Any], vocabulary_size: int) -> None:
    """Raise InputError if weights or states of the optimizer are missing in a checkpoint to resume from, or do not fit.

    Args:
        recipe: the recipe; its network gets the settings that the run's has brought along.
        path: the checkpoint.
        contents: what `read_to_resume` returned of it.
        vocabulary_size: number of pieces.
    """
    from model.optimization import build_optimizer
    from model.transformer import Transformer
    from pipeline.checkpointing.checkpoint import NoInitialValues, network_weights, unfit_to_resume

    weights, averaged = network_weights(contents), recipe.training.ema_decay is not None
    try:
        with NoInitialValues(weights):
            own = recipe.inherit_network(contents["translation"]["network"]).network
            network = Transformer(vocabulary_size, own)
        optimizer = build_optimizer(network.parameters(), recipe.training)
        settings = [_numbers(group) for group in optimizer.param_groups]
        optimizer.load_state_dict(contents["optimizer_states"][0])
        wrong = _wrong_state(network, optimizer)
        if any(group | own != group for group, own in zip(optimizer.param_groups, settings, strict=True)):
            wrong = "the optimizer has other settings"
        shapes = {name: weight.shape for name, weight in network.state_dict().items()}
        # With a moving average, that is the state_dict.
        current = network_weights({"state_dict": contents["current_model_state"]}) if averaged else weights
        if any({name: weight.shape for name, weight in stored.items()} != shapes for stored in (weights, current)):
            wrong = "its weights are not those of the recipe's network"
        if averaged:
            int(contents["averaging_state"]["n_averaged"]), int(contents["callbacks"]["EMA"]["latest_update_step"])
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        wrong = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    if wrong:
        raise unfit_to_resume(path, wrong)


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a group of parameters that determine its steps; the rate is set before each."""
    return {key: value for key, value in group.items() if key != "lr" and type(value) in (int, float, tuple)}


def _wrong_state(network: "nn.Module", optimizer: "Optimizer") -> str:
    """Return which parameter's state an optimizer lacks or has of another shape; empty if there is none."""
    from torch import Tensor
    from torch.optim import Adam

    from model.muon import Muon

    is_own = all(type(module).__module__.startswith(("model.", "torch.")) for module in network.modules())
    for name, parameter in network.named_parameters():
        state = optimizer.state.get(parameter, {})
        if not state and optimizer.state and not is_own:
            continue  # An extension's module may have parameters that it does not use.
        # An extension's optimizer may keep no state, or one of another shape.
        if isinstance(optimizer, Muon) and hasattr(parameter, "projections"):
            own = {"momentum"}
        elif isinstance(optimizer, (Adam, Muon)):
            own = {"step", "exp_avg", "exp_avg_sq"}
        else:
            continue
        if not own <= state.keys():
            return f"the optimizer's state of {name} is missing"
        for key in own:
            shape = () if key == "step" else parameter.shape
            if not isinstance(state[key], Tensor) or state[key].shape != shape:
                return f"the optimizer's state of {name} has another shape"
    return ""


def finished_reason(recipe: "Recipe", path: Path, step: int) -> str | None:
    """Return why a run at this step has nothing left to train, and what would change that; None if it has."""
    from model.settings import DECAY_TO_LAST_STEP
    from pipeline.checkpointing.run_folder import STOPPED_EARLY

    if step >= recipe.trainer["max_steps"]:
        if recipe.training.schedule in DECAY_TO_LAST_STEP:
            return f"finished at step {step}, where training.schedule {recipe.training.schedule} ends"
        return f"finished at step {step}; raise trainer.max_steps to continue"
    if (path / STOPPED_EARLY).exists():
        stop = json_object((path / STOPPED_EARLY).read_bytes()) or {}
        patience = stop.get("patience")
        if stop.get("step") == step and isinstance(patience, int) and 0 < (recipe.run.patience or 0) <= patience:
            from pipeline.inference.metrics import title

            without = f"{patience} validations without a better {title(recipe.run.best_by)}"
            return f"stopped early at step {step} after {without}; raise run.patience to continue"
    return None


def load_initial_weights(path: Path, recipe: "Recipe") -> InitialWeights:
    """Return what the recipe's run takes over from a checkpoint, a run folder or the folder of a Marian model.

    Raises InputError when there is nothing of that kind, or when its network or the corpus's vocabulary differs,
    or when its tokenizer lacks a user symbol or the bytes that the recipe asks for.
    """
    from data_module.corpus.checks import given_tokenizer
    from data_module.corpus.manifest import is_corpus, read_manifest
    from model.settings import changed_keys
    from pipeline.training.marian_import import is_marian

    initial = _from_marian(path, recipe.network) if is_marian(path) else _from_checkpoint(path)
    theirs, ours = map(_effective, (initial.network, asdict(recipe.inherit_network(initial.network).network)))
    different = [
        f"network.{key} {theirs[key]} there, {ours[key]} here"
        for key in changed_keys(theirs, ours)
        if key not in _MAY_DIFFER
    ]
    if different:
        raise InputError(
            f"{initial.path}: has another network: {'; '.join(different)}; give the recipe the same network settings"
        )
    given_tokenizer(recipe.corpus, initial.tokenizer)
    folder = Path(recipe.corpus.folder)
    if is_corpus(folder) and read_manifest(folder)["tokenizer"]["sha256"] != initial.tokenizer.sha256:
        raise InputError(
            f"{folder}: was made with another vocabulary than that of {initial.path}; name another corpus.folder, "
            "which fit then prepares with that vocabulary"
        )
    return initial


def _effective(network: dict[str, Any]) -> dict[str, Any]:
    """Return network settings with the sizes that follow from others, and without those that shape no weights."""
    from model.settings import with_defaults

    network = with_defaults(network)
    size = network["d_model"] // network["num_heads"]
    network = {**network, **{key: network[key] or size for key in ("d_k", "d_v")}}
    return network if network["learned_positions"] else {**network, "max_positions": None}


def _from_checkpoint(path: Path) -> InitialWeights:
    from pipeline.checkpointing.checkpoint import load_model, network_weights, read_checkpoint, resolve_checkpoint

    model = load_model(resolve_checkpoint(path))  # It sees that the weights fit.
    weights = network_weights(read_checkpoint(model.path))
    return InitialWeights(model.path, model.tokenizer, weights, asdict(model.network.settings))


def _from_marian(path: Path, ours: "NetworkSettings") -> InitialWeights:
    from pipeline.training.marian_import import load_marian

    model = load_marian(path)
    # A recipe may leave sizes out that follow from others, or give them.
    size = model.network["d_model"] // model.network["num_heads"]
    sizes = {key: own if (own := getattr(ours, key)) in (None, size) else size for key in ("d_k", "d_v")}
    return InitialWeights(path, model.tokenizer, model.weights, {**asdict(ours), **model.network, **sizes})
