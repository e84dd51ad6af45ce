"""Validate a checkpoint: `python -m tests.integration.validate_on_ranks CHECKPOINT CORPUS NUM_RANKS RESULTS`.

Each rank writes its metrics, and the pairs that it decoded with their translations, to the folder RESULTS.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer

from data_module.batching.batch import PaddedBatch, SpecialIds
from data_module.settings import BatchSettings
from data_module.translation_data_module import TranslationDataModule
from model.settings import DecodingSettings, TrainingSettings
from model.training_module import TranslationModule
from pipeline.checkpointing.checkpoint import read_checkpoint
from pipeline.monitoring import validation_samples
from pipeline.monitoring.validation_samples import ValidationSamples
from pipeline.training.trainer import strategy


class RecordingSamples(ValidationSamples):
    """Also record which pairs this rank decoded."""

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: PaddedBatch, *others: Any
    ) -> None:
        super().on_validation_batch_end(trainer, pl_module, outputs, batch, *others)
        if not batch.is_filler:
            DECODED_PAIRS.extend(outputs[0].tolist())


DECODED_PAIRS: list[int] = []

if __name__ == "__main__":
    checkpoint, corpus, num_ranks, results = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    trained = read_checkpoint(checkpoint)
    tokenizer, network = trained.tokenizer, trained.recipe.network
    special = SpecialIds(pad=tokenizer.pad_id, bos=tokenizer.bos_id, eos=tokenizer.eos_id)
    module = TranslationModule(tokenizer.vocabulary_size, special, network, TrainingSettings(), DecodingSettings(), 1)
    module.load_state_dict(trained.contents["state_dict"])
    data = TranslationDataModule(
        corpus, BatchSettings(batch_tokens=200, max_tokens_per_device=100, workers=0), special, 1
    )
    sources, references = data.validation_text()
    text_sources = data.validation_sources()
    if text_sources:
        module.report_sources(text_sources.names, torch.from_numpy(text_sources.of_pair))
    validation_samples.NUM_SAMPLES = len(sources)  # so that the translations of all pairs are kept
    callback = RecordingSamples(sources, references, tokenizer, text_sources=text_sources)
    options: dict[str, Any] = {"accelerator": "cpu", "devices": num_ranks}
    trainer = Trainer(
        **options,
        strategy=strategy(options, timeout_seconds=60),
        logger=False,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        callbacks=[callback],
    )
    [metrics] = trainer.validate(module, datamodule=data, verbose=False)
    result = {
        "bleu": metrics["validation/bleu"],
        "loss": metrics["validation/loss"],
        "by_source": {tag: value for tag, value in metrics.items() if tag.count("/") == 2},
        "pairs": DECODED_PAIRS,
        "translations": {str(pair): callback.translation(pair).text for pair in callback.samples},
    }
    (results / f"{num_ranks}-{trainer.global_rank}").write_text(json.dumps(result))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # so that all results are there when rank 0 has ended
        torch.distributed.destroy_process_group()
