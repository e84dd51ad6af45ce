"""Validation's translations: scored, and shown beside source and reference."""

import heapq
from typing import Any, NamedTuple

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from data_module.batching.batch import RankBatch
from data_module.tokenization.tokenizer import Tokenizer
from pipeline.monitoring.run_log import RunLog
from pipeline.monitoring.tables import table
from pipeline.monitoring.validation_metrics import ValidationMetrics

NUM_WORST, NUM_LONGEST = 6, 4
_ROOM = 40 * "\u00a0"
"""TensorBoard breaks words to make columns narrow; this keeps one from being too narrow for its numbers."""


class Translation(NamedTuple):
    """What one validation pair became."""

    score: float
    """chrF against the pair's reference."""
    pair: int
    text: str
    pieces: list[int]
    """Ids of its pieces, without special ones."""


class ValidationSamples(Callback):
    """Validation's scores against the references as they were written, and translations to read.

    Shown are the same sentences at each validation, spread evenly over the text, and the longest ones; and the worst.
    """

    @property
    def state_key(self) -> str:
        """Key of the state in checkpoints: the class name in version 0.1.0."""
        return "ValidationText"

    def __init__(
        self,
        sources: list[str],
        references: list[str],
        tokenizer: Tokenizer,
        samples: int = 12,
    ) -> None:
        self._sources, self._references, self._tokenizer = sources, references, tokenizer
        self._lengths = [len(ids) for ids in tokenizer.encode(sources)]
        count = min(samples, len(sources))
        self.samples = [index * len(sources) // count for index in range(count)]
        self._longest = heapq.nlargest(NUM_LONGEST, range(len(sources)), key=lambda pair: (self._lengths[pair], -pair))
        self._shown = {*self.samples, *self._longest}
        self._scores = ValidationMetrics()
        self._kept: dict[int, Translation] = {}
        self._worst: list[Translation] = []
        self.best_bleu = -1.0

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin anew."""
        self._scores = ValidationMetrics().to(pl_module.device)
        self._kept, self._worst = {}, []

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: RankBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Back to text, and counted."""
        if batch.is_filler:
            return
        pairs, tokens, lengths = (tensor.tolist() for tensor in outputs)
        ids = [row[: length - 1] for row, length in zip(tokens, lengths, strict=True)]
        texts = self._tokenizer.decode(ids)
        self._scores.update(
            texts, [self._references[pair] for pair in pairs], ids, [self._lengths[pair] for pair in pairs]
        )
        translations = [Translation(*row) for row in zip(self._scores.sentence_scores, pairs, texts, ids, strict=True)]
        self._kept.update((one.pair, one) for one in translations if one.pair in self._shown)
        self._worst = heapq.nsmallest(NUM_WORST, [*self._worst, *translations])

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the scores on all ranks, and what all ranks have to show."""
        scores = self._scores.compute()
        self._gather()
        if trainer.sanity_checking:
            return
        self.best_bleu = max(self.best_bleu, scores["validation/bleu"])
        pl_module.log_dict({**scores, "validation/best_bleu": self.best_bleu})
        log = trainer.logger
        if isinstance(log, RunLog):
            said = (
                f"BLEU {scores['validation/bleu']:.2f}, chrF {scores['validation/chrf']:.2f} "
                f"({self._scores.signatures()}); chrF in the table is the sentence's own\n\n"
            )
            pages = {
                "translations": [self._kept[pair] for pair in self.samples],
                "translations_worst": self._worst,
                "translations_longest": [self._kept[pair] for pair in self._longest],
            }
            for name, rows in pages.items():
                log.add_text(f"validation/{name}", said + self._table(rows), trainer.global_step)

    def keep(self, pairs: list[int]) -> None:
        """See that `translation` knows these as well as the `samples`."""
        self._shown.update(pairs)

    def translation(self, pair: int) -> Translation:
        """What the last validation made of a pair."""
        return self._kept[pair]

    def state_dict(self) -> dict[str, Any]:
        """Carried over a resume."""
        return {"best_bleu": self.best_bleu}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As `state_dict` gave it."""
        self.best_bleu = state_dict["best_bleu"]

    def _gather(self) -> None:
        """What other ranks have decoded."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, (self._kept, self._worst))
        for kept, _ in everyones:
            self._kept |= kept
        self._worst = heapq.nsmallest(NUM_WORST, [one for _, worst in everyones for one in worst])

    def _table(self, translations: list[Translation]) -> str:
        rows = [
            (f"{one.score:.1f}", self._sources[one.pair], self._references[one.pair], one.text) for one in translations
        ]
        return table([f"chrF {_ROOM}", "source", "reference", "translation"], rows)
