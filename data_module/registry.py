"""What a recipe may choose: implementations by name, such as readers of text and optimizers, and ranges of values."""

import difflib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


def did_you_mean(name: str, known: Iterable[str], otherwise: str, prefix: str = "") -> str:
    """Return a question with `prefix` and the known name that is nearest to `name`; `otherwise` if none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"did you mean {prefix}{near[0]}?" if near else otherwise


LARGEST = 10**12
"""Largest count in a recipe, such as a number of steps or tokens: sums of such counts fit into 64 bits."""


def check_range(settings: object, section: str, rule: str, is_valid: Callable[[Any], bool], *names: str) -> None:
    """Raise ValueError for the first of these settings that is neither None nor valid; `rule` says what is.

    No whole number but a seed may be above `LARGEST`.
    """
    for name in names:
        value = getattr(settings, name)
        if value is not None and not is_valid(value):
            raise ValueError(f"{section}.{name} {value} is not {rule}")
        if isinstance(value, int) and value > LARGEST and name != "seed":
            raise ValueError(f"{section}.{name} {value} is too large; give {LARGEST:,} or less")


class Registry(dict[str, T]):
    """Implementations by name. To add one from outside, before a command starts: `NORMS["rms_norm"] = nn.RMSNorm`."""

    def __init__(self, key: str, **entries: T) -> None:
        """Start with `entries`. `key` names the setting that selects an entry, such as the recipe's "network.norm"."""
        super().__init__(entries)
        self.key = key

    def __missing__(self, name: str) -> T:
        """Raise ValueError."""
        raise ValueError(self.unknown(name))

    def unknown(self, name: str, *others: str) -> str:
        """Return the message for a name that is neither registered nor one of `others`, further values of the key."""
        known = [*self, *others]
        registered = f"registered are: {', '.join(known) or 'none'}; register it before the command starts"
        return f"{self.key} {name!r} is not registered; {did_you_mean(str(name), known, registered)}"
