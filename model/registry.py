"""Named implementations of a part of the model, from which a recipe's key chooses one."""

import difflib
from typing import TypeVar

T = TypeVar("T")


class Registry(dict[str, T]):
    """Implementations by name. To add one from outside: `NORMS["rms_norm"] = nn.RMSNorm`."""

    def __init__(self, key: str, **entries: T) -> None:
        """Start with `entries`. `key` is the recipe's key that holds a name, such as "network.norm"."""
        super().__init__(entries)
        self.key = key

    def __missing__(self, name: str) -> T:
        """Raise ValueError."""
        raise ValueError(self.unknown(name))

    def unknown(self, name: str) -> str:
        """Return the message for a name that is not registered."""
        near = difflib.get_close_matches(str(name), self, n=1, cutoff=0.5)
        way_out = f"did you mean {near[0]}?" if near else f"registered are: {', '.join(self)}"
        return f"{self.key} {name!r} is not registered; {way_out}"
