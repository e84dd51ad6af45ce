"""Quality of validation's translations, from statistics summed over batches and ranks."""

from collections.abc import Mapping, Sequence

import torch
import torchmetrics
from torch import Tensor

from pipeline.config.settings import validation_tag
from pipeline.metrics import metrics
from pipeline.metrics.bleu_tokenizer import DEFAULT

NUM_TRANSLATED = "validation/sentences"
"""Tag of the number of translated sentences, which is logged if some are not translated."""
REPEATED = 4
"""Number of consecutive pieces that count as a repetition if they occurred before in the same translation."""


class ValidationMetrics(torchmetrics.Metric):
    """Scores of the translations of all ranks, equal to the scores of one process with all of them.

    `sources` are the names of the text sources that also get scores of their own. See `metrics_on` for `requested`.
    """

    full_state_update = False
    repeated: Tensor

    def __init__(
        self, bleu_tokenizer: str = DEFAULT, sources: Sequence[str] = (), requested: Sequence[str] = ()
    ) -> None:
        super().__init__()
        self._sources = sources
        self._metrics = metrics.metrics_on(bleu_tokenizer, requested)
        self.sentence_scores: list[float] = []
        """chrF of each translation of the last update."""
        for name, metric in self._metrics.items():
            sums = torch.zeros(max(1, len(sources)), len(metric.statistics("", "")), dtype=torch.int64)
            self.add_state(_state(name), sums, dist_reduce_fx="sum")
        self.add_state("repeated", torch.zeros(2, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, hypotheses: list[str], references: list[str], pieces: list[list[int]], source: int = 0) -> None:
        """Add translations, all of one text source (an index into `sources`), to the sums.

        `pieces` are the ids of each translation, without special ones.
        """
        rows = list(zip(hypotheses, references, pieces, strict=True))
        self.sentence_scores = []
        if not rows:
            return
        for name, metric in self._metrics.items():
            counts = [metric.statistics(hypothesis, reference) for hypothesis, reference, _ in rows]
            # Sum on the CPU, and move the sums once per update.
            self._sum(name)[source] += torch.tensor(counts).sum(0).to(self.repeated.device)
            if name == "chrf":
                self.sentence_scores = [float(metric.score(of_sentence)) for of_sentence in counts]
        self.repeated += torch.tensor([_repetitions(ids) for ids in pieces]).sum(0).to(self.repeated.device)

    def compute(self) -> dict[str, float]:
        """Return `validation/<name>` for each metric, and ratios.

        With sources, also `validation/<name>/<source>`. BLEU, chrF and exact match are in percent. Sources without a
        sentence are left out.
        """
        totals = {name: self._sum(name).sum(0).tolist() for name in self._metrics}
        hypothesis_length, reference_length = totals["bleu"][:2]
        repeated, runs = self.repeated.tolist()
        return {
            **{f"validation/{name}": float(metric.score(totals[name])) for name, metric in self._metrics.items()},
            "validation/length_ratio": hypothesis_length / max(reference_length, 1),
            "validation/repetition": repeated / max(runs, 1),
            **{
                f"validation/{name}/{source}": float(metric.score(self._sum(name)[index].tolist()))
                for name, metric in self._metrics.items()
                for index, source in enumerate(self._sources)
                if self._sum("bleu")[index, 1]
            },
        }

    def signatures(self) -> str:
        """Return the signature of every metric."""
        return "; ".join(f"{metrics.title(name)} {metric.signature()}" for name, metric in self._metrics.items())

    def _sum(self, name: str) -> Tensor:
        """Return a metric's summed statistics by text source [sources, statistics]."""
        return getattr(self, _state(name))


def quality(scores: Mapping[str, float] | Mapping[str, Tensor], best_by: str) -> str:
    """Return the scores of a validation as text, that of `best_by` first; empty if nothing was translated."""
    of_some = f" of {float(scores[NUM_TRANSLATED]):,.0f} sentences" if NUM_TRANSLATED in scores else ""
    names = sorted((*metrics.METRICS, *metrics.ON_REQUEST), key=lambda name: name != best_by)
    found = {name: scores[f"validation/{name}"] for name in names if f"validation/{name}" in scores}
    return ", ".join(metrics.title_and_score(name, float(score)) for name, score in found.items()) + of_some


def best_tag(best_by: str) -> str:
    """Return the tag of the best score so far, by a value of `run.best_by`."""
    return validation_tag(best_by).replace("/", "/best_")


def _state(name: str) -> str:
    return f"{name}_statistics"


def _repetitions(ids: list[int]) -> tuple[int, int]:
    """Return the number of runs of `REPEATED` pieces that occurred before, and the number of all runs."""
    runs = [tuple(ids[start : start + REPEATED]) for start in range(len(ids) - REPEATED + 1)]
    return len(runs) - len(set(runs)), len(runs)
