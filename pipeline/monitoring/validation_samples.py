"""Scores the translations of a validation, and logs a table of source, reference and translation."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from lightning.pytorch import Callback, LightningModule, Trainer

from data_module.batch import PaddedBatch
from data_module.corpus.manifest import SplitSources
from data_module.system.files import PlainValues
from data_module.tokenization.tokenizer import Tokenizer
from model.training_module import TranslationModule
from pipeline.config.settings import LIKELIHOOD, validation_tag
from pipeline.metrics.bleu_tokenizer import DEFAULT
from pipeline.metrics.metrics import mode_of
from pipeline.monitoring.run_log import RunLog, table
from pipeline.monitoring.validation_metrics import NUM_TRANSLATED, ValidationMetrics, best_tag, quality
from pipeline.ranks.rank_messages import value_of_each_rank

NUM_SAMPLES = 12
_COLUMN_PADDING = 40 * "\u00a0"
"""Keeps TensorBoard from making the first column too narrow for its numbers."""


class ScoredTranslation(NamedTuple):
    """The translation of a validation pair."""

    score: float
    """Its chrF against the reference."""
    pair: int
    """Index of the pair in the validation text."""
    text: str
    pieces: list[int]
    """Ids of its pieces, without BOS and EOS."""


class ValidationSamples(Callback):
    """Scores the validation's translations against the raw references, and logs a table of translations.

    The table shows samples that are spread evenly over the text, the same at each validation. If nothing is translated,
    there are no scores and no table.

    With `text_sources`, each source is scored separately too. The best value of `best_by` so far is logged.
    `translated` are the pairs whose sources are translated, all if None. See `metrics_on` for `requested`.
    """

    def __init__(
        self,
        sources: list[str],
        references: list[str],
        tokenizer: Tokenizer,
        bleu_tokenizer: str = DEFAULT,
        text_sources: SplitSources | None = None,
        best_by: str = "bleu",
        translated: Sequence[int] | None = None,
        requested: Sequence[str] = (),
    ) -> None:
        self._sources, self._references, self._tokenizer = sources, references, tokenizer
        self._translated = range(len(sources)) if translated is None else translated
        count = min(NUM_SAMPLES, len(self._translated))
        self.samples = [self._translated[index * len(self._translated) // count] for index in range(count)]
        self._shown = {*self.samples}
        self._bleu_tokenizer, self._text_sources = bleu_tokenizer, text_sources
        names = text_sources.names if text_sources else ()
        self._metrics = ValidationMetrics(bleu_tokenizer, names, [*requested, best_by])
        self._kept: dict[int, ScoredTranslation] = {}
        self._best_by = best_by
        self.best_score: float | None = None

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reset the metrics and forget the translations of the last validation."""
        self._metrics.to(pl_module.device).reset()
        self._kept = {}

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: PaddedBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Turn the batch's translations into text and score them."""
        if batch.is_filler or not batch.is_translated:
            return
        pairs, tokens, lengths = (tensor.tolist() for tensor in outputs)
        ids = [row[: length - 1] for row, length in zip(tokens, lengths, strict=True)]
        texts = self._tokenizer.decode(ids)
        references = [self._references[pair] for pair in pairs]
        # All pairs of a batch are of one text source.
        source = int(self._text_sources.of_pair[pairs[0]]) if self._text_sources else 0
        self._metrics.update(texts, references, ids, source)
        for row in zip(self._metrics.sentence_scores, pairs, texts, ids, strict=True):
            if (made := ScoredTranslation(*row)).pair in self._shown:
                self._kept[made.pair] = made

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the scores over all ranks, and the table."""
        scores = self._metrics.compute() if self._translated else {}
        if 0 < len(self._translated) < len(self._sources):
            scores[NUM_TRANSLATED] = float(len(self._translated))
        self._gather()
        if self._best_by == LIKELIHOOD:
            assert isinstance(pl_module, TranslationModule)
            score = pl_module.validation_losses()[validation_tag(LIKELIHOOD)]
        else:
            score = scores[validation_tag(self._best_by)]
        best = max if mode_of(self._best_by) == "max" else min
        if math.isfinite(score):
            self.best_score = score if self.best_score is None else best(self.best_score, score)
        if self.best_score is not None:
            scores[best_tag(self._best_by)] = self.best_score
        pl_module.log_dict(scores)
        log = trainer.logger
        if isinstance(log, RunLog) and self._translated:
            about = f"({self._metrics.signatures()}); the table shows the chrF of each sentence"
            rows = self._table([self._kept[pair] for pair in self.samples])
            page = f"{quality(scores, self._best_by)} {about}\n\n{rows}"
            log.add_text("validation/translations", page, trainer.global_step)

    def keep(self, pairs: list[int]) -> None:
        """Make `translation` available for these pairs, as it is for `samples`."""
        self._shown.update(pairs)

    def translation(self, pair: int) -> ScoredTranslation:
        """Return the last validation's translation of a pair that is kept."""
        return self._kept[pair]

    def state_dict(self) -> PlainValues:
        """Return the state to save: the best score so far, and BLEU's tokenizer."""
        return {"best_score": self.best_score, "bleu_tokenizer": self._bleu_tokenizer}

    def load_state_dict(self, state_dict: PlainValues) -> None:
        """Restore the best score; `read_resume_point` reads the tokenizer before the callback is made."""
        # The first runs of format 2, such as the one in tests, knew only BLEU, and stored it as `best_bleu`.
        self.best_score = state_dict.get("best_score", state_dict.get("best_bleu"))

    def _gather(self) -> None:
        """Collect the translations of all ranks."""
        for theirs in value_of_each_rank(list(self._kept.values())):
            self._kept |= {made.pair: made for made in (ScoredTranslation(*one) for one in theirs)}

    def _table(self, translations: list[ScoredTranslation]) -> str:
        rows = [
            (f"{score:.1f}", self._sources[pair], self._references[pair], text) for score, pair, text, _ in translations
        ]
        return table([f"chrF {_COLUMN_PADDING}", "source", "reference", "translation"], rows)
