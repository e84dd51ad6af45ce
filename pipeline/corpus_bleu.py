"""Corpus BLEU over ranks: sacreBLEU's statistics, summed."""

from typing import Any

import torch
from sacrebleu.metrics import BLEU
from torch import Tensor
from torchmetrics import Metric


class CorpusBleu(Metric):
    """sacreBLEU of all hypotheses on all ranks, the very number that one process with all of them would give."""

    full_state_update = False
    correct: Tensor
    total: Tensor
    lengths: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._bleu = BLEU()
        zeros = torch.zeros(self._bleu.max_ngram_order, dtype=torch.int64)
        self.add_state("correct", zeros.clone(), dist_reduce_fx="sum")
        self.add_state("total", zeros.clone(), dist_reduce_fx="sum")
        self.add_state("lengths", torch.zeros(2, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, hypotheses: list[str], references: list[str]) -> None:
        """Count one batch's n-grams."""
        if not hypotheses:
            return
        counts = self._bleu.corpus_score(hypotheses, [references])
        self.correct += torch.tensor(counts.counts, device=self.correct.device)
        self.total += torch.tensor(counts.totals, device=self.total.device)
        self.lengths += torch.tensor([counts.sys_len, counts.ref_len], device=self.lengths.device)

    def compute(self) -> Tensor:
        """BLEU in percent; 0 before the first update."""
        lengths = self.lengths.tolist()
        if lengths[0] == 0:
            return torch.tensor(0.0)
        score = BLEU.compute_bleu(self.correct.tolist(), self.total.tolist(), lengths[0], lengths[1])
        return torch.tensor(score.score)
