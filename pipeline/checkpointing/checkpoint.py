"""Checkpoint files: written atomically, found, read, averaged.

A checkpoint needs no other file: its key `translation` holds the network's settings, the tokenizer and the recipe as
plain values and tensors, so that it loads with `weights_only`.
"""

import sys
import warnings
import zipfile
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from data_module.errors import PROGRAM, InputError
from data_module.files import FORMAT_VERSION, atomic_file, check_format, misshapen
from data_module.tokenization.tokenizer import Tokenizer
from model.settings import DecodingSettings, NetworkSettings, changed_keys
from model.transformer import Transformer
from pipeline.checkpointing.run_folder import AVERAGES, best_path, is_valid, latest_valid, step_of
from pipeline.config.recipe import Recipe, stored_settings
from pipeline.config.settings import BLEU_TOKENIZERS

_PREFIX = "network."


@dataclass(frozen=True)
class TrainedModel:
    """The model of a checkpoint, ready to translate."""

    network: Transformer
    """In evaluation mode, float32, on the CPU."""
    tokenizer: Tokenizer
    decoding: DecodingSettings
    recipe: dict[str, Any]
    path: Path
    step: int


def metadata(recipe: dict[str, Any], network: NetworkSettings, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what is stored under a checkpoint's key `translation`."""
    stored = {"tokenizer": tokenizer.model} | ({} if tokenizer.seen is None else {"seen_pieces": tokenizer.seen})
    return {
        "format_version": FORMAT_VERSION,
        "network": asdict(network),
        **{name: torch.frombuffer(bytearray(value), dtype=torch.uint8) for name, value in stored.items()},
        "recipe": recipe,
    }


def write_atomic(contents: dict[str, Any] | memoryview, path: Path) -> None:
    """Save a checkpoint as a whole or not at all; a full disk leaves earlier checkpoints intact.

    Args:
        contents: the contents, or the bytes of a file that `torch.save` has made of them.
        path: the file.
    """
    with atomic_file(path) as file:
        if isinstance(contents, memoryview):
            file.write(contents)
        else:
            torch.save(contents, file)


def resolve_checkpoint(path: Path) -> Path:
    """Return the checkpoint that a path stands for.

    For a run folder that is its average if it is not older than the newest checkpoint, else the best one by validation
    BLEU, else the newest. An average that is older is reported on standard error.

    Raises InputError when there is none.
    """
    if path.is_file():
        return path
    if not path.exists():
        raise InputError(f"{path}: there is no such checkpoint or run folder; fit names the folder it writes to")
    newest, _ = latest_valid(path)
    # By the step, because a clock may go back; of the same step, the one that was written last.
    made = {average: _made_at(average) for average in path.glob(AVERAGES)}
    average = max(made, key=lambda average: (made[average], average.stat().st_mtime), default=None)
    # A run that was resumed after averaging has better weights than its average.
    outdated = average if average and newest and made[average] < step_of(newest) else None
    candidates = [None if outdated else average, *filter(Path.is_file, [best_path(path)]), newest]
    chosen = next(filter(None, candidates), None)
    if chosen is None:
        raise InputError(f"{path}: holds no checkpoint; give a .ckpt file or a run folder that fit has written")
    if newest and outdated:
        print(
            f"{outdated.name} is of step {made[outdated]} and the run is at step {step_of(newest)}, so "
            f"{chosen.name} is used; to use an average, run {PROGRAM} average again",
            file=sys.stderr,
        )
    return chosen


def _made_at(average: Path) -> int:
    """Return the step of the newest checkpoint that an average was made of or, with `--best`, that the run had."""
    contents = read_checkpoint(average)
    selection = contents.get("selection")
    step = selection.get("run_step") if isinstance(selection, dict) else contents["global_step"]
    if type(step) is not int:
        raise InputError(f"{average}: is damaged: selection.run_step is no number of steps; remove it")
    return step


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the file's contents, memory-mapped; no code in it is executed.

    Settings are checked as those of a recipe, and completed by those that are newer than the file.

    Raises InputError for a file that is truncated, has another format, or is not a checkpoint of this program.
    """
    if not path.is_file():
        raise InputError(f"{path}: there is no such checkpoint")
    if not is_valid(path):
        raise InputError(f"{path}: is truncated or not a checkpoint; copy it again or use an earlier one")
    try:
        _check_archive(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # About other kinds of files, which are refused below.
            contents = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        _check_size(contents, path.stat().st_size)
    except Exception:
        raise InputError(
            f"{path}: cannot be read as a checkpoint: it may be an export, damaged, or contain more than plain "
            "tensors; give another file that fit has written, or remove it, if fit shall resume from an earlier one"
        ) from None
    part = contents.get("translation") if isinstance(contents, dict) else None
    if not isinstance(part, dict) or not {"state_dict", "global_step"} <= contents.keys():
        raise InputError(f"{path}: is not a checkpoint of this program; give one that fit has written")
    check_format(path, part.get("format_version"), "start a new run")
    try:
        return {**contents, "translation": _checked(contents)}
    except ValueError as error:
        raise InputError(f"{path}: is damaged: {str(error)[:300]}; give another one that fit has written") from None


_MAX_VALUES, _MAX_DEPTH = 1_000_000, 64
"""How many values a checkpoint has at most, and in how many others one of them lies."""


def _check_archive(path: Path) -> None:
    """Raise ValueError if a file unpacks to more than it has bytes, or reserves memory by a number in it."""
    with zipfile.ZipFile(path) as archive:
        if sum(entry.file_size for entry in archive.infolist()) > path.stat().st_size:
            raise ValueError("its entries are larger than the file")
        for entry in archive.infolist():
            if entry.filename.endswith("data.pkl") and b"\nbytearray\n" in archive.read(entry):
                raise ValueError("bytearray(n) takes n bytes")


def _check_size(contents: Any, file_bytes: int) -> None:
    """Raise ValueError if values that a file has once stand in too many places, or tensors have more bytes than it."""
    todo, num_values, num_bytes = [(contents, 0)], 0, 0
    while todo:
        value, depth = todo.pop()
        items: Collection[Any] = ()
        if isinstance(value, Tensor):
            own = value.numel() * value.element_size()
            num_bytes += own
            plain = value.layout == torch.strided and value.device.type == "cpu"
            if not plain or own > value.untyped_storage().nbytes():
                raise ValueError("a tensor is larger than what is stored of it")
        elif isinstance(value, (dict, list, tuple, set)):
            items = value.values() if isinstance(value, dict) else value
        num_values += len(items)
        if num_values > _MAX_VALUES or depth > _MAX_DEPTH or num_bytes > 4 * file_bytes:  # Weights may be tied.
            raise ValueError("its values are too many")
        todo += [(item, depth + 1) for item in items]


def _checked(contents: dict[str, Any]) -> dict[str, Any]:
    """Return the part `translation` of a checkpoint, its settings complete; raise ValueError for what is wrong."""
    part, weights, step = contents["translation"], contents["state_dict"], contents["global_step"]
    if type(step) is not int or step < 0:
        raise ValueError("global_step is no number of steps")
    if not isinstance(weights, dict) or not all(
        isinstance(name, str) and isinstance(weight, Tensor) for name, weight in weights.items()
    ):
        raise ValueError("state_dict has something else than named tensors")
    for key in ("tokenizer", *(("seen_pieces",) if "seen_pieces" in part else ())):
        value = part.get(key)
        if not isinstance(value, Tensor) or value.dtype != torch.uint8 or value.dim() != 1:
            raise ValueError(f"translation.{key} is no row of bytes")
    network = stored_settings(part.get("network"), NetworkSettings, "network", exact=True)
    return {**part, "network": asdict(network), "recipe": stored_settings(part.get("recipe"), Recipe, "").as_dict()}


def stored_tokenizer(path: Path, contents: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer of a checkpoint that `read_checkpoint` has read; raise InputError if it is none."""
    part = contents["translation"]
    seen = part.get("seen_pieces")  # Version 1.0 did not store it.
    try:
        return Tokenizer(part["tokenizer"].numpy().tobytes(), seen=None if seen is None else seen.numpy().tobytes())
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


_PROGRESS = {"total": {str: int}, "current": {str: int}}
_RESUMED = {
    "loops": {
        "fit_loop": {
            "state_dict": {"combined_loader": [{"epoch": int, "next_batch": int}]},
            "epoch_loop.state_dict": {"_batches_that_stepped": int},
            "epoch_loop.batch_progress": _PROGRESS,
            "epoch_loop.manual_optimization.optim_step_progress": _PROGRESS,
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
    "skipped_steps": [(float, int)],
}
"""The types of what a resumed run reads of a checkpoint, beside tensors. Lightning takes some of it for optional."""


def read_to_resume(path: Path) -> dict[str, Any]:
    """Return the contents of a run's checkpoint as `read_checkpoint` does, all there that a resumed run reads.

    Raises InputError also where something is missing, or does not belong to the checkpoint's step.
    """
    contents = read_checkpoint(path)
    wrong = misshapen(contents, _RESUMED)
    if not wrong:
        step, loop = contents["global_step"], contents["loops"]["fit_loop"]
        counted = loop["epoch_loop.manual_optimization.optim_step_progress"]["total"].get("completed")
        # Each step takes a batch, and each epoch has one.
        places = [place["epoch"] + place["next_batch"] <= step for place in loop["state_dict"]["combined_loader"]]
        if not step == step_of(path) == counted:
            wrong = "the number of steps"
        elif places != [True]:
            wrong = "the position in the corpus"
        elif len(contents["optimizer_states"]) != 1:
            wrong = "optimizer_states"
        elif contents["callbacks"]["ValidationSamples"]["bleu_tokenizer"] not in BLEU_TOKENIZERS:
            wrong = "callbacks.ValidationSamples.bleu_tokenizer"
    if wrong:
        raise unfit_to_resume(path, f"{wrong} is missing or wrong")
    return contents


def unfit_to_resume(path: Path, reason: str) -> InputError:
    """Return the error for a checkpoint that a run cannot be resumed from."""
    return InputError(f"{path}: cannot be resumed from ({reason}); remove it, or use --fresh")


def load_model(path: Path) -> TrainedModel:
    """Return the model of a checkpoint.

    Raises InputError as `read_checkpoint` does, and when the weights do not match the checkpoint's settings.
    """
    contents = read_checkpoint(path)
    part = contents["translation"]
    tokenizer = stored_tokenizer(path, contents)
    weights = network_weights(contents)
    try:
        with NoInitialValues(weights):
            network = Transformer(tokenizer.vocabulary_size, NetworkSettings(**part["network"]))
        network.load_state_dict(weights)
    except ValueError as error:  # a norm or an activation that is not registered
        raise InputError(f"{path}: {error}") from None
    except (RuntimeError, TypeError) as error:  # TypeError: a size of more than 64 bits
        reason = " ".join(str(error).split())
        raise InputError(
            f"{path}: its weights do not match its own settings and vocabulary of {tokenizer.vocabulary_size} "
            f"pieces ({reason[:200]}); use another checkpoint"
        ) from None
    decoding = DecodingSettings(**part["recipe"]["decoding"])
    return TrainedModel(network.eval(), tokenizer, decoding, part["recipe"], path, contents["global_step"])


class NoInitialValues(TorchFunctionMode):
    """Leaves new weights uninitialized, because those of a checkpoint replace them.

    The meta device would do the same, but the first operation on it imports torch.compile, which takes a second.
    Raises RuntimeError where there would be many more than in the checkpoint.
    """

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        # A custom part of a network may make tensors that are not stored.
        self._tensors = 2 * len(weights) + 1000
        self._elements = 2 * sum(weight.numel() for weight in weights.values()) + 10**8

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init" or func in (Tensor.normal_, Tensor.uniform_):
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        made = func(*args, **kwargs)
        if func in (torch.empty, torch.zeros, torch.ones):
            self._tensors -= 1
            self._elements -= made.numel()
            if min(self._tensors, self._elements) < 0:
                raise RuntimeError("the settings are those of a larger network")
        return made


def network_weights(contents: dict[str, Any]) -> dict[str, Tensor]:
    """Return the network's state dict, with the names that `Transformer` uses."""
    return {
        name.removeprefix(_PREFIX): tensor
        for name, tensor in contents["state_dict"].items()
        if name.startswith(_PREFIX)
    }


def _check_same_model(path: Path, contents: dict[str, Any], other: Path, other_contents: dict[str, Any]) -> None:
    """Raise InputError if the first of two checkpoints has another network or vocabulary than the other."""
    parts = contents["translation"], other_contents["translation"]
    fits = _shapes(contents) == _shapes(other_contents) and not changed_keys(parts[0]["network"], parts[1]["network"])
    if not fits or not torch.equal(parts[0]["tokenizer"], parts[1]["tokenizer"]):
        raise InputError(f"{path}: has another network or vocabulary than {other}; average one run only")


def average(paths: list[Path], read: Callable[[Path], dict[str, Any]] = read_checkpoint) -> dict[str, Any]:
    """Return a checkpoint whose weights are the mean of those given, summed in float64 (section 6.1).

    It has no optimizer state: it is for translating, or for starting another run.

    Args:
        paths: the checkpoints, the newest last.
        read: returns the contents of one of them.

    Raises InputError when networks or vocabularies differ.
    """
    first = read(paths[-1])
    # Copies, because weights that are stored in float64 would be added to in place.
    sums = {name: tensor.to(torch.float64, copy=True) for name, tensor in first["state_dict"].items()}
    for path in paths[:-1]:
        other = read(path)
        _check_same_model(path, other, paths[-1], first)
        for name, tensor in other["state_dict"].items():
            sums[name] += tensor
    return {
        "state_dict": {name: (total / len(paths)).to(first["state_dict"][name].dtype) for name, total in sums.items()},
        "translation": first["translation"],
        "global_step": first["global_step"],
        "averaged": [path.name for path in paths],
        "pytorch-lightning_version": first.get("pytorch-lightning_version"),
    }


def _shapes(contents: dict[str, Any]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in contents["state_dict"].items()}
