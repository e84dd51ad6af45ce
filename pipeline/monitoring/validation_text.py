"""Validation's translations, scored and shown."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from data_module.batch import StepShare
from data_module.tokenizer import Tokenizer
from pipeline.corpus_bleu import CorpusBleu


class ValidationText(Callback):
    """Validation BLEU against the references as they were written, and translations to read."""

    def __init__(self, sources: list[str], references: list[str], tokenizer: Tokenizer, samples: int = 8) -> None:
        self._sources, self._references, self._tokenizer = sources, references, tokenizer
        self._bleu = CorpusBleu()
        self._samples = samples
        self._translations: dict[int, str] = {}

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin anew."""
        self._bleu = CorpusBleu().to(pl_module.device)
        self._translations = {}

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: StepShare,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Back to text, and counted."""
        if batch.weightless:
            return
        pairs, tokens, lengths = (tensor.tolist() for tensor in outputs)
        ids = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
        texts = self._tokenizer.decode(ids)
        self._bleu.update(texts, [self._references[pair] for pair in pairs])
        self._translations.update((pair, text) for pair, text in zip(pairs, texts, strict=True) if pair < self._samples)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the score on all ranks and rank 0's samples."""
        pl_module.log("validation/bleu", self._bleu.compute().to(pl_module.device))
        if trainer.is_global_zero and trainer.logger is not None and not trainer.sanity_checking:
            rows = [
                f"| {_cell(self._sources[pair])} | {_cell(self._references[pair])} | {_cell(text)} |"
                for pair, text in sorted(self._translations.items())
            ]
            table = "\n".join(["| source | reference | translation |", "| --- | --- | --- |", *rows])
            trainer.logger.experiment.add_text("validation/translations", table, trainer.global_step)  # type: ignore[attr-defined]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
