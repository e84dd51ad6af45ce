"""Private API of sacreBLEU, last seen in 2.6.0; `tests/pipeline/test_private_api.py` fails when it moves.

sacreBLEU has no public function for chrF's sufficient statistics or for a score from their sum. Both are needed to add
up statistics over batches and ranks, and to resample a text without counting its n-grams again.
"""

from typing import Any

from sacrebleu.metrics import CHRF


def chrf_statistics(metric: CHRF, hypothesis: str, reference: str) -> list[int]:
    """Return the n-gram counts that `metric.corpus_score([hypothesis], [[reference]])` works from.

    Three counts for each n-gram order: in the hypothesis, in the reference, in both.
    """
    return metric._extract_corpus_statistics([hypothesis], [[reference]])[0]


def chrf_score(metric: CHRF, statistics: Any) -> float:
    """Return the `score` of `metric.corpus_score` on sentences whose `chrf_statistics` have this sum."""
    return metric._compute_f_score(statistics)
