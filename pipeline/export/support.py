"""Checks whether another program knows the parts of a network."""

from collections.abc import Iterable

from data_module.errors import InputError
from model.fast.compiled_search import unsupported
from model.settings import NetworkSettings


def refuse(program: str, lacking: Iterable[str]) -> None:
    """Raise InputError if a program lacks anything of a model, such as "network.norm rms"."""
    if parts := ", ".join(lacking):
        raise InputError(f"{program} lacks {parts}, which this model has; export other formats")


def lacking_layers(network: NetworkSettings) -> list[str]:
    """Return the settings that neither CTranslate2 nor Transformers' Marian knows."""
    size = network.d_model / network.num_heads
    sizes = (("d_k", network.key_size), ("d_v", network.value_size))
    kind = unsupported(network)
    return [
        *([kind] if kind else []),
        *(f"network.{name} {value} (it has d_model / num_heads, {size:g})" for name, value in sizes if value != size),
    ]
