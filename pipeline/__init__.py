"""Train, evaluate and ship the Transformer of "Attention Is All You Need": see docs/python-api.md.

The names below are imported at their first use, so that `import pipeline` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from data_module.errors import InputError
    from model.beyond.sampling import Sampling
    from pipeline.api import Model, load, train
    from pipeline.inference.translator import Hypothesis

__all__ = ["Hypothesis", "InputError", "Model", "Sampling", "load", "train"]

_HOMES = {
    "Hypothesis": "pipeline.inference.translator",
    "InputError": "data_module.errors",
    "Model": "pipeline.api",
    "Sampling": "model.beyond.sampling",
    "load": "pipeline.api",
    "train": "pipeline.api",
}


def __getattr__(name: str) -> Any:
    """Import a name of `__all__`."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the names for completion."""
    return sorted([*globals(), *__all__])
