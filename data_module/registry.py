"""Implementations by name: parts of the network, optimizers, readers of text, metrics."""

import difflib
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def did_you_mean(name: str, known: Iterable[str], otherwise: str, prefix: str = "") -> str:
    """Return a question with `prefix` and the known name that is nearest to `name`; `otherwise` if none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"did you mean {prefix}{near[0]}?" if near else otherwise


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
