"""Weights and tokenizer of another run as the starting point of a new one (`fit --init-from`)."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from data_module.corpus.checks import check_tokenizer
from data_module.corpus.manifest import is_corpus, read_manifest
from data_module.errors import InputError
from data_module.tokenization.tokenizer import Tokenizer
from model.settings import changed_keys
from pipeline.config.recipe import Recipe

if TYPE_CHECKING:
    from torch import Tensor

_MAY_DIFFER = ("dropout", "attention_dropout", "activation_dropout")
"""Network settings that affect neither the weights' shapes nor what they compute."""


@dataclass(frozen=True)
class InitialWeights:
    """What a new run takes over; everything else, such as the schedule, starts from the beginning."""

    path: Path
    tokenizer: Tokenizer
    weights: "dict[str, Tensor]"
    """The state dict of `Transformer`, memory-mapped."""


def load_initial_weights(path: Path, recipe: Recipe) -> InitialWeights:
    """Return what the recipe's run takes over from a checkpoint or run folder.

    Raises InputError when there is no checkpoint, or when its network or the corpus's vocabulary differs,
    or when its tokenizer lacks a user symbol or the bytes that the recipe asks for.
    """
    from pipeline.checkpointing.checkpoint import network_weights, read_checkpoint, resolve_checkpoint

    path = resolve_checkpoint(path)
    contents = read_checkpoint(path)
    part = contents["translation"]
    theirs, ours = part["network"], asdict(recipe.network)
    different = [
        f"network.{key} {theirs.get(key)} there, {ours.get(key)} here"
        for key in changed_keys(theirs, ours)
        if key not in _MAY_DIFFER
    ]
    if different:
        raise InputError(
            f"{path}: has another network: {'; '.join(different)}; give the recipe the same network settings"
        )
    tokenizer = Tokenizer(part["tokenizer"].numpy().tobytes())
    check_tokenizer(recipe.corpus, tokenizer)
    folder = Path(recipe.corpus.folder)
    if is_corpus(folder) and read_manifest(folder)["tokenizer"]["sha256"] != tokenizer.sha256:
        raise InputError(
            f"{folder}: was made with another vocabulary than that of {path}; name another corpus.folder, "
            "which fit then prepares with that vocabulary"
        )
    return InitialWeights(path, tokenizer, network_weights(contents))
