"""Weights and tokenizer of another run or of a Marian model, as the starting point of a new run (`fit --init-from`)."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_module.corpus.checks import check_tokenizer
from data_module.corpus.manifest import is_corpus, read_manifest
from data_module.errors import InputError
from data_module.tokenization.tokenizer import Tokenizer
from model.settings import NetworkSettings, changed_keys
from pipeline.config.recipe import Recipe
from pipeline.training.marian_import import is_marian, load_marian

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
    """The state dict of `Transformer`; that of a checkpoint is memory-mapped."""
    network: dict[str, Any]
    """The network's settings."""


def load_initial_weights(path: Path, recipe: Recipe) -> InitialWeights:
    """Return what the recipe's run takes over from a checkpoint, a run folder or the folder of a Marian model.

    Raises InputError when there is nothing of that kind, or when its network or the corpus's vocabulary differs,
    or when its tokenizer lacks a user symbol or the bytes that the recipe asks for.
    """
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
    check_tokenizer(recipe.corpus, initial.tokenizer)
    folder = Path(recipe.corpus.folder)
    if is_corpus(folder) and read_manifest(folder)["tokenizer"]["sha256"] != initial.tokenizer.sha256:
        raise InputError(
            f"{folder}: was made with another vocabulary than that of {initial.path}; name another corpus.folder, "
            "which fit then prepares with that vocabulary"
        )
    return initial


def _effective(network: dict[str, Any]) -> dict[str, Any]:
    """Return network settings with the sizes that follow from others, and without those that shape no weights."""
    size = network["d_model"] // network["num_heads"]
    network = {**network, **{key: network[key] or size for key in ("d_k", "d_v")}}
    return network if network["learned_positions"] else {**network, "max_positions": None}


def _from_checkpoint(path: Path) -> InitialWeights:
    from pipeline.checkpointing.checkpoint import network_weights, read_checkpoint, resolve_checkpoint

    path = resolve_checkpoint(path)
    contents = read_checkpoint(path)
    part = contents["translation"]
    tokenizer = Tokenizer(part["tokenizer"].numpy().tobytes())
    return InitialWeights(path, tokenizer, network_weights(contents), part["network"])


def _from_marian(path: Path, ours: NetworkSettings) -> InitialWeights:
    model = load_marian(path)
    # A recipe may leave sizes out that follow from others, or give them.
    size = model.network["d_model"] // model.network["num_heads"]
    sizes = {key: own if (own := getattr(ours, key)) in (None, size) else size for key in ("d_k", "d_v")}
    return InitialWeights(path, model.tokenizer, model.weights, {**asdict(ours), **model.network, **sizes})
