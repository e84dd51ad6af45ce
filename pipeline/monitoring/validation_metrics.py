"""How good translations are: sacreBLEU's statistics, summed over batches and ranks."""

from typing import Any

import torch
from sacrebleu.metrics import BLEU, CHRF
from torch import Tensor
from torchmetrics import Metric

LENGTHS = (10, 20, 30, 40, 60)
"""A source of up to so many pieces belongs to that bucket; longer ones to a last one."""
REPEATED = 4
"""So many pieces in a row that occurred before in the same translation are a repetition."""


class ValidationMetrics(Metric):
    """Scores of all translations on all ranks, the very numbers that one process with all of them would give."""

    full_state_update = False
    bleu: Tensor
    chrf: Tensor
    repeated: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._bleu, self._chrf = BLEU(), CHRF()
        # Which a signature needs, and a rank without validation text would not learn.
        self._bleu.num_refs = self._chrf.num_refs = 1
        self.sentence_scores: list[float] = []
        """chrF of each translation that the last update has counted."""
        # Matching and all n-grams of each order, the translations' length and the references'.
        shape = (len(LENGTHS) + 1, 2 * self._bleu.max_ngram_order + 2)
        self.add_state("bleu", torch.zeros(shape, dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("chrf", torch.zeros(3 * self._chrf.order, dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("repeated", torch.zeros(2, dtype=torch.int64), dist_reduce_fx="sum")

    def update(
        self, hypotheses: list[str], references: list[str], pieces: list[list[int]], source_lengths: list[int]
    ) -> None:
        """Count translations, as text and as pieces, of sources of so many pieces; see `sentence_scores`."""
        bleu, chrf = torch.zeros_like(self.bleu, device="cpu"), torch.zeros_like(self.chrf, device="cpu")
        repeated = torch.zeros_like(self.repeated, device="cpu")
        self.sentence_scores = []
        # sacreBLEU keeps chrF's sums to itself, but for its own use in significance tests.
        statistics = self._chrf._extract_corpus_statistics(hypotheses, [references]) if hypotheses else []
        rows = zip(hypotheses, references, pieces, source_lengths, statistics, strict=True)
        for hypothesis, reference, ids, length, counts in rows:
            found = self._bleu.corpus_score([hypothesis], [[reference]])
            bleu[_bucket(length)] += torch.tensor([*found.counts, *found.totals, found.sys_len, found.ref_len])
            chrf += torch.tensor(counts)
            self.sentence_scores.append(float(self._chrf._compute_f_score(counts)))
            repeated += torch.tensor(_repetitions(ids))
        self.bleu += bleu.to(self.bleu.device)
        self.chrf += chrf.to(self.chrf.device)
        self.repeated += repeated.to(self.repeated.device)

    def compute(self) -> dict[str, float]:
        """BLEU, chrF and BLEU by source length in percent, and ratios; a bucket that nothing fell into is left out."""
        bleu, (repeated, runs) = self.bleu.cpu(), self.repeated.tolist()
        whole = bleu.sum(0).tolist()
        bounds = zip((1, *(bound + 1 for bound in LENGTHS)), (*LENGTHS, None), strict=True)
        names = [f"{low:02}-{high:02}" if high else f"{low:02}-" for low, high in bounds]
        return {
            "validation/bleu": _bleu(whole),
            "validation/chrf": float(self._chrf._compute_f_score(self.chrf.tolist())),
            "validation/length_ratio": whole[-2] / max(whole[-1], 1),
            "validation/repetition": repeated / max(runs, 1),
            **{
                f"validation_bleu_by_length/{name}_pieces": _bleu(row)
                for name, row in zip(names, bleu.tolist(), strict=True)
                if row[-1]
            },
        }

    def signatures(self) -> str:
        """Which BLEU and which chrF."""
        return f"BLEU {self._bleu.get_signature()}; chrF {self._chrf.get_signature()}"


def _bucket(length: int) -> int:
    return sum(length > bound for bound in LENGTHS)


def _bleu(row: list[int]) -> float:
    order = len(row) // 2 - 1
    correct, total, (translation, reference) = row[:order], row[order : 2 * order], row[2 * order :]
    return BLEU.compute_bleu(correct, total, translation, reference, smooth_method="exp").score if translation else 0.0


def _repetitions(ids: list[int]) -> tuple[int, int]:
    """Runs of pieces that occurred before, and all of them."""
    runs = [tuple(ids[start : start + REPEATED]) for start in range(len(ids) - REPEATED + 1)]
    return len(runs) - len(set(runs)), len(runs)
