"""Private API of torchmetrics, last seen in 1.9.0; `tests/pipeline/test_private_api.py` fails when it moves.

- `torchmetrics.utilities.imports._MATPLOTLIB_AVAILABLE`: where matplotlib is installed, importing Lightning imports
  torchmetrics, and that pyplot, for metrics that plot themselves. No public alternative.
"""

import importlib
import sys
from importlib.machinery import ModuleSpec
from typing import Any


class _PyplotLeftOut:
    """Finds nothing, but clears the flag before the module that reads it is imported."""

    _has_cleared = False

    def find_spec(self, name: str, path: Any, target: Any = None, /) -> ModuleSpec | None:
        if name == "torchmetrics.utilities.plot" and not self._has_cleared:
            self._has_cleared = True
            vars(importlib.import_module("torchmetrics.utilities.imports"))["_MATPLOTLIB_AVAILABLE"] = False
        return None


def leave_out_pyplot() -> None:
    """Let torchmetrics not import pyplot in this process, which takes 0.3 s and writes to the home folder.

    Each rank would do so, and warn where the home cannot be written. Only the rank that draws imports matplotlib, when
    it draws first.
    """
    sys.meta_path.insert(0, _PyplotLeftOut())
