"""Checkpoint files: written atomically, found, read, averaged.

A checkpoint needs no other file: its key `translation` holds the network's settings, the tokenizer and the recipe as
plain values and tensors, so that it loads with `weights_only`. `resume_point.py` reads what a run resumes with.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from data_module.errors import PROGRAM, InputError, first_of
from data_module.system.files import FORMAT_VERSION, PlainValues, atomic_file, check_format, misshapen
from data_module.tokenization.text_form import SHAPE
from data_module.tokenization.tokenizer import Tokenizer
from model.settings import DecodingSettings, NetworkSettings, changed_keys
from model.transformer import Transformer
from pipeline.checkpointing.run_folder import (
    AVERAGES,
    best_path,
    foreign_settings,
    is_valid,
    latest_valid,
    step_of,
    stored_recipe,
    stored_run_id,
)
from pipeline.checkpointing.weights_only import load_weights_only
from pipeline.config.recipe import Recipe, stored_settings
from pipeline.runtime.console import report

PREFIX = "network."
"""Prefix of the names of weights in a checkpoint, which are those of `TranslationModule`."""
_STORED = {
    "global_step": int,
    "state_dict": {str: Tensor},
    "selection": {"run_step": int},
    "translation": {
        "tokenizer": Tensor,
        "seen_pieces": (Tensor, NoneType),
        "run_id": (str, NoneType),
        "training_pairs": (str, NoneType),
        "text_form": (dict, NoneType),
    },
}
"""Types of a checkpoint's values, except for settings; see `misshapen`."""


class Identity(NamedTuple):
    """What a checkpoint was trained by and on; None in files of version 1.0 and 1.1."""

    run_id: str | None = None
    """The identity of the run."""
    training_pairs: str | None = None
    """The hash of the corpus's training pairs."""


NO_IDENTITY = Identity()


@dataclass(frozen=True)
class Checkpoint:
    """The contents of a checkpoint file, which were checked when it was read; tensors are memory-mapped."""

    path: Path
    step: int
    """Optimizer steps taken."""
    run_step: int
    """Steps that the run had taken when the file was written: more than `step` for an average around the best."""
    recipe: Recipe
    """The recipe of its run, whose `network` has the settings of the weights."""
    tokenizer: Tokenizer
    weights: dict[str, Tensor]
    """The state dict of `Transformer`; for a run with a moving average, the average."""
    contents: PlainValues
    """The whole file, from which `resume_point.py` takes what a run resumes with."""

    @property
    def identity(self) -> Identity:
        """The run and the training pairs that the weights are of."""
        return Identity(*map(self.contents["translation"].get, Identity._fields))

    def network(self) -> Transformer:
        """Return the network with these weights, in evaluation mode, float32, on the CPU.

        Raises InputError when the weights do not match the settings.
        """
        num_pieces = self.tokenizer.vocabulary_size
        try:
            with NoInitialValues():
                network = Transformer(num_pieces, self.recipe.network)
            network.load_state_dict(self.weights)
        except ValueError as error:  # a norm or an activation that is not registered
            raise InputError(f"{self.path}: {error}") from None
        except (RuntimeError, TypeError) as error:  # TypeError: a size of more than 64 bits
            reason = " ".join(str(error).split())
            raise InputError(
                f"{self.path}: its weights do not match its own settings and vocabulary of {num_pieces} pieces "
                f"({reason[:200]}); use another checkpoint"
            ) from None
        return network.eval()


@dataclass(frozen=True)
class TrainedModel:
    """The model of a checkpoint, ready to translate."""

    network: Transformer
    """In evaluation mode, float32, on the CPU."""
    tokenizer: Tokenizer
    decoding: DecodingSettings
    recipe: PlainValues
    path: Path
    step: int


def load_model(path: Path) -> TrainedModel:
    """Return the model of a checkpoint.

    Raises InputError as `read_checkpoint` and `Checkpoint.network` do.
    """
    read = read_checkpoint(path)
    return TrainedModel(read.network(), read.tokenizer, read.recipe.decoding, read.recipe.as_dict(), path, read.step)


def metadata(recipe: Recipe, tokenizer: Tokenizer, identity: Identity) -> PlainValues:
    """Return what is stored under a checkpoint's key `translation`."""
    stored = {"tokenizer": tokenizer.model} | ({} if tokenizer.seen is None else {"seen_pieces": tokenizer.seen})
    return {
        "format_version": FORMAT_VERSION,
        "network": asdict(recipe.network),
        **{name: torch.frombuffer(bytearray(value), dtype=torch.uint8) for name, value in stored.items()},
        "text_form": tokenizer.form,
        "recipe": recipe.as_dict(),
        **identity._asdict(),
    }


def write_atomic(contents: PlainValues, path: Path) -> None:
    """Save a checkpoint as a whole or not at all; a full disk leaves earlier checkpoints intact."""
    with atomic_file(path) as file:
        torch.save(contents, file)


def resolve_checkpoint(path: Path) -> Path:
    """Return the checkpoint that a path stands for.

    For a run folder that is its average if it is not older than the newest checkpoint, else the best one by
    `run.best_by`, else the newest. An average that is older is reported on standard error.

    Raises InputError when there is none, and as `check_members` does.
    """
    if path.is_file():
        return path
    if not path.exists():
        raise InputError(f"{path}: there is no such checkpoint or run folder; fit names the folder it writes to")
    newest, _ = latest_valid(path)
    best, averages = best_path(path), sorted(path.glob(AVERAGES))
    check_members(path, filter(None, (newest, best, *averages)))
    # Compared by step, because a clock may go back; of averages of one step, the one written last.
    made = {average: read_checkpoint(average).run_step for average in averages}
    average = max(made, key=lambda average: (made[average], average.stat().st_mtime), default=None)
    # A run that was resumed after averaging has better weights than its average.
    outdated = average if average and newest and made[average] < step_of(newest) else None
    candidates = [None if outdated else average, *filter(Path.is_file, [best]), newest]
    chosen = next(filter(None, candidates), None)
    if chosen is None:
        raise InputError(f"{path}: holds no checkpoint; give a .ckpt file or a run folder that fit has written")
    if newest and outdated:
        report(
            f"{outdated.name} is of step {made[outdated]} and the run is at step {step_of(newest)}, so "
            f"{chosen.name} is used; to use an average, run {PROGRAM} average again"
        )
    return chosen


def check_members(run: Path, paths: Iterable[Path], recipe: Recipe | None = None) -> str | None:
    """Check that checkpoints in a run folder are the run's own; return its identity, None in version 1.0 and 1.1.

    A folder without an identity has that of the first of `paths` that has one. `recipe` is that of the run, by default
    the one in the folder.

    Raises InputError if a checkpoint is of another run: if it has another identity, or, where folder or
    checkpoint has none, if its recipe differs in keys that may not change.
    """
    stored = own = stored_run_id(run)
    recipe = recipe or stored_recipe(run)  # Without one, checkpoints are used as those outside a run folder are.
    for path in paths:
        try:
            checkpoint = read_checkpoint(path)
        except InputError:
            continue  # A damaged file is named by what uses it; `fit` may have removed another one meanwhile.
        run_id = checkpoint.identity.run_id
        own = own or run_id
        different = [] if (stored and run_id) or not recipe else foreign_settings(recipe, checkpoint.recipe)
        if different or run_id not in (None, own):
            how = f" ({first_of(different)})" if different else ""
            raise InputError(
                f"{path}: is of another run than {run}{how}; move it out of that folder, and name the file itself to "
                "use it"
            )
    return own


def read_checkpoint(path: Path) -> Checkpoint:
    """Read and check a file; no code in it is executed.

    Settings are checked like those of a recipe; settings that are newer than the file get their defaults.

    Raises InputError for a file that is truncated, has another format, or is not a checkpoint of this program.
    """
    if not path.is_file():
        raise InputError(f"{path}: there is no such checkpoint")
    if not is_valid(path):
        raise InputError(f"{path}: is truncated or not a checkpoint; copy it again or use an earlier one")
    try:
        contents = load_weights_only(path)
    except Exception:  # A foreign or damaged file causes exceptions of many types, which PyTorch does not document.
        raise InputError(
            f"{path}: cannot be read as a checkpoint: it may be an export, damaged, or contain more than plain "
            "tensors; give another file that fit has written, or remove it to let fit resume from an earlier one"
        ) from None
    part = contents.get("translation") if isinstance(contents, dict) else None
    if not isinstance(part, dict) or not {"state_dict", "global_step"} <= contents.keys():
        raise InputError(f"{path}: is not a checkpoint of this program; give one that fit has written")
    check_format(path, part.get("format_version"), "start a new run")
    try:
        return _checked(path, contents)
    except (InputError, ValueError) as error:
        raise InputError(f"{path}: is damaged: {str(error)[:300]}; give another one that fit has written") from None


def _checked(path: Path, contents: PlainValues) -> Checkpoint:
    """Return the contents of a file; raise InputError or ValueError if a value is wrong."""
    # Only an average around the best validation has a selection.
    complete = {"selection": {"run_step": contents["global_step"]}, **contents}
    if wrong := misshapen(complete, _STORED):
        raise ValueError(f"{wrong} is missing or wrong")
    part, steps = contents["translation"], (contents["global_step"], complete["selection"]["run_step"])
    network = stored_settings(part.get("network"), NetworkSettings, "network", exact=True)
    recipe = replace(stored_settings(part.get("recipe"), Recipe, ""), network=network)
    model, seen = (
        None if tensor is None else tensor.to(torch.uint8).numpy().tobytes()
        for tensor in (part["tokenizer"], part.get("seen_pieces"))  # Version 1.0 did not store the latter.
    )
    if (form := part.get("text_form")) is not None and (wrong := misshapen(form, SHAPE, "text_form")):
        raise ValueError(f"{wrong} is missing or wrong")
    tokenizer = Tokenizer(model or b"", seen=seen, form=form)
    weights = {
        name.removeprefix(PREFIX): one for name, one in contents["state_dict"].items() if str(name).startswith(PREFIX)
    }
    return Checkpoint(path, *steps, recipe, tokenizer, weights, contents)


class NoInitialValues(TorchFunctionMode):
    """Leaves new weights uninitialized, because those of a checkpoint replace them.

    The meta device would do the same, but the first operation on it imports torch.compile, which takes a second.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: PlainValues | None = None,
    ) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init" or func in (Tensor.normal_, Tensor.uniform_):
            return kwargs["tensor"] if kwargs and "tensor" in kwargs else args[0]
        return func(*args, **(kwargs or {}))


def average(checkpoints: list[Checkpoint]) -> PlainValues:
    """Return the contents of a checkpoint with the mean weights of several, summed in float64 (section 6.1).

    It has no optimizer state: it is for translating, or for starting another run. The newest of them is the last.

    Raises InputError when networks or vocabularies differ.
    """
    *others, newest = checkpoints
    # Copied, because sums are in place and would change weights that are stored in float64.
    sums = {name: tensor.to(torch.float64, copy=True) for name, tensor in newest.weights.items()}
    for other in others:
        shapes = [{name: tensor.shape for name, tensor in each.weights.items()} for each in (other, newest)]
        settings = [asdict(each.recipe.network) for each in (other, newest)]
        if changed_keys(*settings) or shapes[0] != shapes[1] or other.tokenizer.model != newest.tokenizer.model:
            raise InputError(
                f"{other.path}: has another network or vocabulary than {newest.path}; average one run only"
            )
        for name, tensor in other.weights.items():
            sums[name] += tensor
    means = {name: (total / len(checkpoints)).to(newest.weights[name].dtype) for name, total in sums.items()}
    return {
        "state_dict": {f"{PREFIX}{name}": mean for name, mean in means.items()},
        "translation": metadata(newest.recipe, newest.tokenizer, newest.identity),
        "global_step": newest.step,
        "averaged": [one.path.name for one in checkpoints],
    }
