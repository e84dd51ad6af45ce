"""The checkpoint that a run resumes from, with checks of everything that a resumed run takes from it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import NoneType

from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from data_module.errors import InputError
from data_module.system.files import PlainValues, misshapen
from data_module.tokenization.tokenizer import Tokenizer
from model.beyond.muon import Muon
from model.optimization import build_optimizer
from model.transformer import Transformer
from pipeline.checkpointing.checkpoint import PREFIX, Checkpoint, NoInitialValues, read_checkpoint
from pipeline.checkpointing.run_folder import step_of
from pipeline.config.recipe import Recipe
from pipeline.config.settings import BLEU_TOKENIZERS

_PROGRESS = {"total": {str: int}, "current": {str: int}}
_RESUMED = {
    "loops": {
        "fit_loop": {
            "state_dict": {"combined_loader": [{"epoch": int, "next_batch": int}]},
            "epoch_loop.state_dict": {"_batches_that_stepped": int},
            "epoch_loop.batch_progress": _PROGRESS,
            "epoch_loop.scheduler_progress": _PROGRESS,
            "epoch_loop.automatic_optimization.state_dict": {},
            "epoch_loop.automatic_optimization.optim_progress": {
                "optimizer": {"step": _PROGRESS, "zero_grad": _PROGRESS}
            },
            "epoch_loop.manual_optimization.state_dict": {},
            "epoch_loop.manual_optimization.optim_step_progress": _PROGRESS,
            "epoch_loop.val_loop.state_dict": {},
            "epoch_loop.val_loop.batch_progress": _PROGRESS,
            "epoch_progress": _PROGRESS,
        }
    },
    "callbacks": {
        "GracefulStop": {"validation_pending": bool},
        "ValidationSamples": {"bleu_tokenizer": str, "best_score": (float, NoneType)},
        "TrainingMonitor": {"counted_seconds": (float, int), "validation_seconds": (float, int, NoneType)},
        "CheckpointCallback": {
            "best_score": (float, NoneType),
            "best_step": (int, NoneType),
            "temporary_step": (int, NoneType),
        },
    },
    "optimizer_states": [{"state": {str: {}}, "param_groups": [{"params": [int]}]}],
    "lr_schedulers": [{}],
    "skipped_steps": [(float, int)],
}
"""Types of what a resumed run reads from a checkpoint, beside tensors; Lightning would ignore missing values."""
_AVERAGED = {
    "current_model_state": {str: Tensor},
    "averaging_state": {"n_averaged": (Tensor, int)},
    "callbacks": {"EMA": {"latest_update_step": int}},
}
"""Types of what a run with a moving average reads in addition."""


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run resumes from."""

    path: Path
    step: int
    """Optimizer steps taken."""
    validation_pending: bool
    """Whether the run was stopped during the validation after this step, which has to be repeated."""
    bleu_tokenizer: str
    """The tokenizer of validation BLEU that the run began with."""
    tokenizer: Tokenizer
    """The corpus's tokenizer, with the pieces that this run and the runs that it started from have seen."""
    network: PlainValues
    """The network's settings."""
    training_pairs: str | None = None
    """The hash of the training pairs that the run is trained on; None in checkpoints of version 1.0 and 1.1."""


def read_resume_point(path: Path, recipe: Recipe) -> ResumePoint:
    """Read the checkpoint that the recipe's run resumes from.

    Raises InputError as `read_checkpoint` does, and if a value is missing, contradicts the checkpoint's step, or does
    not fit the recipe's network and optimizer.
    """
    checkpoint = read_checkpoint(path)
    contents, averaged = checkpoint.contents, recipe.training.ema_decay is not None
    wrong = misshapen(contents, _RESUMED) or (averaged and misshapen(contents, _AVERAGED)) or _misplaced(checkpoint)
    if wrong := f"{wrong} is missing or wrong" if wrong else _unfit(checkpoint, recipe):
        raise InputError(f"{path}: cannot be resumed from ({wrong}); remove it, or use --fresh")
    states = contents["callbacks"]
    return ResumePoint(
        path,
        checkpoint.step,
        states["GracefulStop"]["validation_pending"],
        states["ValidationSamples"]["bleu_tokenizer"],
        checkpoint.tokenizer,
        asdict(checkpoint.recipe.network),
        checkpoint.identity.training_pairs,
    )


def _misplaced(checkpoint: Checkpoint) -> str:
    """Return the name of a value that contradicts the checkpoint's step or is not allowed; empty if there is none."""
    contents, step = checkpoint.contents, checkpoint.step
    loop = contents["loops"]["fit_loop"]
    counted = loop["epoch_loop.manual_optimization.optim_step_progress"]["total"].get("completed")
    if not step == step_of(checkpoint.path) == counted:
        return "the number of steps"
    # Each step takes a batch, and each epoch has at least one.
    if [place["epoch"] + place["next_batch"] <= step for place in loop["state_dict"]["combined_loader"]] != [True]:
        return "the position in the corpus"
    if len(contents["optimizer_states"]) != 1:
        return "optimizer_states"
    if contents["callbacks"]["ValidationSamples"]["bleu_tokenizer"] not in BLEU_TOKENIZERS:
        return "callbacks.ValidationSamples.bleu_tokenizer"
    return ""


def _unfit(checkpoint: Checkpoint, recipe: Recipe) -> str:
    """Return which weights or states of the optimizer are missing or do not fit the recipe; empty if all do."""
    settings = recipe.inherit_network(asdict(checkpoint.recipe.network)).network
    contents, states = checkpoint.contents, ["state_dict"]
    if recipe.training.ema_decay is not None:
        states.append("current_model_state")
    try:
        with NoInitialValues():
            network = Transformer(checkpoint.tokenizer.vocabulary_size, settings)
        shapes = {f"{PREFIX}{name}": weight.shape for name, weight in network.state_dict().items()}
        if any({name: weight.shape for name, weight in contents[state].items()} != shapes for state in states):
            return "its weights are not those of the recipe's network"
        optimizer = build_optimizer(network.parameters(), recipe.training)
        own = [_numbers(group) for group in optimizer.param_groups]
        optimizer.load_state_dict(contents["optimizer_states"][0])
        if [_numbers(group) for group in optimizer.param_groups] != own:
            return "the optimizer has other settings"
        return _missing_state(network, optimizer)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _numbers(group: Mapping[str, object]) -> dict[str, object]:
    """Return the settings of a parameter group that determine its steps; the learning rate is set before each step."""
    return {key: value for key, value in group.items() if key != "lr" and type(value) in (int, float, tuple)}


def _missing_state(network: nn.Module, optimizer: Optimizer) -> str:
    """Return a message about a parameter whose optimizer state is missing; empty if there is none."""
    is_own = all(type(module).__module__.startswith(("model.", "torch.")) for module in network.modules())
    for name, parameter in network.named_parameters():
        state = optimizer.state.get(parameter, {})
        if not state and optimizer.state and not is_own:
            continue  # An extension's module may have parameters that it does not use.
        # An extension's optimizer may keep no state.
        if isinstance(optimizer, Muon) and hasattr(parameter, "projections"):
            own = {"momentum"}
        elif isinstance(optimizer, (Adam, Muon)):
            own = {"step", "exp_avg", "exp_avg_sq"}
        else:
            continue
        if not own <= state.keys():
            return f"the optimizer's state of {name} is missing"
    return ""
