"""Private API of torchmetrics 1.9.0 and sacreBLEU 2.6.0; `tests/pipeline/test_private_api.py` fails if it changes.

- `torchmetrics.utilities.imports._MATPLOTLIB_AVAILABLE`: where matplotlib is installed, importing Lightning imports
  torchmetrics, which imports pyplot for metrics that plot themselves. No public alternative.
- sacreBLEU's `_extract_corpus_statistics` and `_compute_score_from_stats`: sufficient statistics and a score from their
  sum, to add up statistics over batches and ranks, and to resample a text without counting its n-grams again. No public
  alternative for chrF; BLEU's `corpus_score` takes twice as long.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sacrebleu.metrics.base import Metric


class _PyplotLeftOut:
    """Finds nothing, but clears the flag before the module that reads it is imported."""

    _has_cleared = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        if name == "torchmetrics.utilities.plot" and not self._has_cleared:
            self._has_cleared = True
            vars(importlib.import_module("torchmetrics.utilities.imports"))["_MATPLOTLIB_AVAILABLE"] = False
        return None


def leave_out_pyplot() -> None:
    """Keep torchmetrics from importing pyplot in this process, which takes 0.3 s and writes to the home folder.

    Each rank would import it, and warn where the home cannot be written. Only the rank that draws imports matplotlib,
    before its first image.
    """
    sys.meta_path.insert(0, _PyplotLeftOut())


def sentence_statistics(metric: "Metric", hypothesis: str, *references: str) -> list[int]:
    """Return the counts of a sentence that `metric.corpus_score` sums and works from."""
    return metric._extract_corpus_statistics([hypothesis], [[one] for one in references])[0]


def score_of_statistics(metric: "Metric", statistics: Any) -> float:
    """Return the `score` of `metric.corpus_score` on sentences whose `sentence_statistics` have this sum."""
    return metric._compute_score_from_stats(statistics).score
