"""The plan of a start: what a run continues, and whether that fits. `doctor` checks it, `fit` follows it."""

from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor

from data_module.corpus.checks import given_tokenizer
from data_module.corpus.manifest import Manifest, is_corpus, read_manifest
from data_module.corpus.store import training_pairs
from data_module.errors import InputError
from data_module.system.files import PlainValues, read_json
from data_module.system.outputs import followed
from data_module.tokenization.tokenizer import Tokenizer
from model.settings import DECAY_TO_LAST_STEP, changed_keys, with_defaults
from pipeline.checkpointing.checkpoint import (
    NO_IDENTITY,
    Identity,
    check_members,
    read_checkpoint,
    resolve_checkpoint,
)
from pipeline.checkpointing.resume_point import ResumePoint, read_resume_point
from pipeline.checkpointing.run_folder import (
    STOPPED_EARLY,
    RunFolder,
    all_checkpoints,
    check_same_run,
    files_of_run,
    latest_valid,
    should_reset,
)
from pipeline.config.recipe import Recipe
from pipeline.export.marian_import import is_marian, load_marian
from pipeline.metrics.bleu_tokenizer import Choice, choose_tokenizer
from pipeline.metrics.metrics import title
from pipeline.runtime.launch import JobStep, process_rank

_MAY_DIFFER = ("dropout", "attention_dropout", "activation_dropout")
"""Network settings that affect neither the weights' shapes nor what they compute."""


@dataclass(frozen=True)
class InitialWeights:
    """What a new run takes over; everything else, such as the schedule, starts from the beginning."""

    path: Path
    tokenizer: Tokenizer
    weights: dict[str, Tensor]
    """The state dict of `Transformer`; that of a checkpoint is memory-mapped."""
    network: PlainValues
    """The network's settings."""


@dataclass(frozen=True)
class Plan:
    """What a start of `fit` would do; every rank makes the same plan."""

    recipe: Recipe
    """The recipe, with the settings of the network if that was imported from another program."""
    job: JobStep | None
    """The SLURM job step; None outside a job."""
    reset: bool
    """Remove the run that is in the folder (`--fresh`)."""
    resume: ResumePoint | None = None
    initial: InitialWeights | None = None
    """Weights of another run for a new one (`--init-from`)."""
    notes: tuple[str, ...] = ()
    """Lines for the user: which checkpoints are damaged, and what has changed since the last start."""
    run_id: str | None = None
    """The identity of the run that is in the folder, on rank 0; None if the run has none yet."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that the corpus has to have if it is prepared now; None to learn one."""
        begun = self.resume or self.initial
        return begun.tokenizer if begun else None


@dataclass(frozen=True)
class Start:
    """A plan whose corpus is there, on every rank."""

    plan: Plan
    folder: RunFolder | None
    """The locked run folder on rank 0, None on other ranks."""
    tokenizer: Tokenizer
    manifest: Manifest
    """The corpus's manifest."""
    identity: Identity = NO_IDENTITY
    """What checkpoints say that they are of; empty on other ranks, which write none."""


def plan_start(recipe: Recipe, job: JobStep | None, fresh: bool, init_from: Path | None) -> Plan:
    """Find out what the recipe's run continues: its own newest checkpoint, or the weights of another run or model.

    `fresh` and `init_from` are those of `fit`.

    Raises InputError where the run is that of another recipe, a checkpoint in its folder is of another run or cannot be
    resumed from, the weights do not fit or would be removed, or the corpus has another vocabulary.
    """
    folder = recipe.run_folder()
    reset = should_reset(fresh, folder, job)
    checkpoint, notes, run_id = (None, [], None) if reset else _own_checkpoints(folder, recipe)
    if checkpoint is None:
        initial = load_initial_weights(init_from, recipe) if init_from is not None else None
        removed = [file.parent.resolve() / file.name for file in files_of_run(folder)] if reset else []
        if initial and followed(initial.path) in removed:
            raise InputError(f"{initial.path}: --fresh would remove it; copy it elsewhere, or give another run.folder")
        recipe = recipe.inherit_network(initial.network) if initial else recipe
        return Plan(recipe, job, reset, None, initial, tuple(notes), run_id)
    if init_from is not None:
        notes.append(f"{folder}: resuming this run; --init-from is ignored")
    resume = read_resume_point(checkpoint, recipe)
    check_vocabulary(recipe, resume.tokenizer, f"the run in {folder}", ", or remove that run with --fresh")
    return Plan(recipe.inherit_network(resume.network), job, reset, resume, None, tuple(notes), run_id)


def _own_checkpoints(folder: Path, recipe: Recipe) -> tuple[Path | None, list[str], str | None]:
    """Return the newest checkpoint of the recipe's run, notes for the user, and the run's identity; None if missing."""
    checkpoint, damaged = latest_valid(folder)
    notes = [f"{path}: is incomplete; skipped" for path in damaged]
    if all_checkpoints(folder):
        changes = check_same_run(folder, recipe, texts_may_change=is_corpus(recipe.corpus_folder()))
        notes += [f"changed since the last start: {change}" for change in changes]
    # Rank 0 reads them all: its error ends the others.
    members = [checkpoint] if process_rank() and checkpoint else all_checkpoints(folder)
    return checkpoint, notes, check_members(folder, members, recipe)


def check_vocabulary(recipe: Recipe, tokenizer: Tokenizer, owner: str, way_out: str = "") -> None:
    """Raise InputError if the recipe's corpus is prepared with another tokenizer than that of `owner`.

    `way_out` is what else the user can do than name another corpus.
    """
    folder = recipe.corpus_folder()
    if is_corpus(folder) and read_manifest(folder)["tokenizer"]["sha256"] != tokenizer.sha256:
        raise InputError(
            f"{recipe.corpus.folder}: has another vocabulary than {owner}; name another corpus.folder, which fit then "
            f"prepares with that vocabulary{way_out}"
        )


def check_pairs(plan: Plan) -> str:
    """Return the hash of the training pairs of the recipe's corpus, which is there.

    Raises InputError if the run to resume is trained on other pairs. A checkpoint of version 1.0 or 1.1 does not say on
    which: the names of its texts may not change.
    """
    folder, pairs = plan.recipe.run_folder(), training_pairs(plan.recipe.corpus_folder())
    if plan.resume is not None and plan.resume.training_pairs is None:
        check_same_run(folder, plan.recipe)
    elif plan.resume is not None and plan.resume.training_pairs != pairs:
        raise InputError(
            f"{plan.recipe.corpus.folder}: has other training pairs than those that the run in {folder} is trained on; "
            f"name the corpus.folder that has those, or train on these in another run.folder with --init-from {folder}"
        )
    return pairs


def choose_bleu_tokenizer(recipe: Recipe, resume: ResumePoint | None) -> Choice:
    """Return the tokenizer of validation BLEU: the one that a resumed run began with, or that of a new run.

    Raises InputError when packages of the tokenizer are not installed.
    """
    began = None if resume is None else resume.bleu_tokenizer
    return choose_tokenizer(recipe.run.bleu_tokenizer, recipe.corpus.target_language, began)


def finished_reason(recipe: Recipe, path: Path, step: int) -> str | None:
    """Return why a run at this step has nothing left to train, and what would change that; None if training goes on."""
    if step >= recipe.trainer["max_steps"]:
        if recipe.training.schedule in DECAY_TO_LAST_STEP:
            schedule = recipe.training.schedule
            return f"finished at step {step}, where training.schedule {schedule} ends; give another run.folder"
        return f"finished at step {step}; raise trainer.max_steps to continue"
    if (path / STOPPED_EARLY).exists():
        stop = read_json(path / STOPPED_EARLY) or {}
        patience = stop.get("patience")
        if stop.get("step") == step and isinstance(patience, int) and 0 < (recipe.run.patience or 0) <= patience:
            without = f"{patience} validations without a better {title(recipe.run.best_by)}"
            return f"stopped early at step {step} after {without}; raise run.patience to continue"
    return None


def load_initial_weights(path: Path, recipe: Recipe) -> InitialWeights:
    """Return what the recipe's run takes over from a checkpoint, a run folder or the folder of a Marian model.

    Raises InputError when there is nothing of that kind, or when its network or the corpus's vocabulary differs,
    or when its tokenizer lacks a user symbol or the bytes that the recipe asks for.
    """
    if is_marian(path):
        model, own = load_marian(path), asdict(recipe.network)
        # A recipe may leave sizes out that follow from others, or give them.
        size = model.network["d_model"] // model.network["num_heads"]
        sizes = {key: own[key] if own[key] in (None, size) else size for key in ("d_k", "d_v")}
        initial = InitialWeights(path, model.tokenizer, model.weights, {**own, **model.network, **sizes})
    else:
        read = read_checkpoint(resolve_checkpoint(path))
        read.network()  # It raises InputError if the weights do not fit.
        initial = InitialWeights(read.path, read.tokenizer, read.weights, asdict(read.recipe.network))
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
    check_vocabulary(recipe, initial.tokenizer, str(initial.path))
    return initial


def _effective(network: PlainValues) -> PlainValues:
    """Return network settings with the sizes that follow from others, and without those that shape no weights."""
    network = with_defaults(network)
    size = network["d_model"] // network["num_heads"]
    network = {**network, **{key: network[key] or size for key in ("d_k", "d_v")}}
    return network if network["learned_positions"] else {**network, "max_positions": None}
