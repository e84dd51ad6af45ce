"""At each validation, logs images of attention, and embeddings for the projector."""

from itertools import zip_longest
from types import ModuleType

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from data_module.corpus.store import ParallelCorpus
from data_module.tokenization.tokenizer import NUM_SPECIAL_IDS, Tokenizer
from model.attention_maps import attention_maps
from model.settings import NetworkSettings
from model.training_module import TranslationModule
from pipeline.checkpointing.run_folder import EVENTS
from pipeline.config.settings import MonitoringSettings
from pipeline.monitoring.run_log import RunLog, table
from pipeline.monitoring.validation_samples import ValidationSamples

_MAX_PIECES = 40
"""Sentences are cut to this many pieces."""
_MAX_HEADS = 8
_MAX_COUNTED_TOKENS = 5_000_000


class AttentionPlots(Callback):
    """Draws the attention of chosen validation pairs, on rank 0.

    Of each stack, the first and the last layer are drawn, and at most eight heads. Must come after `samples`, which
    collects the translations of the validation's `sources`, and before `EMA`, which restores the weights. The start of
    the training corpus gives the frequencies of pieces.
    """

    def __init__(
        self,
        settings: MonitoringSettings,
        samples: ValidationSamples,
        sources: list[str],
        tokenizer: Tokenizer,
        corpus: ParallelCorpus,
        network: NetworkSettings,
    ) -> None:
        self._samples, self._pieces = samples, tokenizer.pieces()
        self._sources = [ids.tolist() for ids in tokenizer.encode(sources)]
        self._pairs = samples.samples[:2] if settings.attention_sentences is None else settings.attention_sentences
        samples.keep(self._pairs)
        depths = {"encoder": network.encoder_layers, "decoder": network.decoder_layers, "cross": network.decoder_layers}
        self._layers = {kind: sorted({0, depth - 1}) for kind, depth in depths.items()}
        self._heads = range(min(network.num_heads, _MAX_HEADS))
        counted = [side.tokens[:_MAX_COUNTED_TOKENS] for side in (corpus.source, corpus.target)]
        self._occurrences = np.bincount(np.concatenate(counted), minlength=tokenizer.vocabulary_size)
        by_frequency = NUM_SPECIAL_IDS + np.argsort(-self._occurrences[NUM_SPECIAL_IDS:], kind="stable")
        self._frequent_pieces = by_frequency[: settings.embedding_pieces]

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the images and write the projector's files."""
        log = trainer.logger
        if not isinstance(log, RunLog) or not log.writes:
            return
        assert isinstance(pl_module, TranslationModule)
        from pipeline.monitoring import attention_images  # Imports matplotlib, which other ranks do not need.

        for number, pair in enumerate(self._pairs, 1):
            self._log_attention(attention_images, log, pl_module, number, pair)
        self._write_embeddings(log, pl_module)

    def _log_attention(
        self, drawing: ModuleType, log: RunLog, module: TranslationModule, number: int, pair: int
    ) -> None:
        """Log the attention of a validation pair while the decoder is given its translation."""
        special = module.special
        translation = [piece for piece in self._samples.translation(pair).pieces if piece >= NUM_SPECIAL_IDS]
        source, target = self._sources[pair][: _MAX_PIECES - 1], translation[: _MAX_PIECES - 1]
        sides = [*source, special.eos], [special.bos, *target]
        maps = attention_maps(module.network, *(torch.tensor([ids], device=module.device) for ids in sides))
        pieces = [[self._pieces[index] for index in ids] for ids in (source, target)]
        labels = drawing.axis_labels(*pieces, self._pieces[special.bos], self._pieces[special.eos])
        if labels.note:
            rows = [(index, *row) for index, row in enumerate(zip_longest(*pieces, fillvalue=""), 1)]
            page = f"{labels.note}\n\n{table(['number', 'source', 'target'], rows)}"
            log.add_text(f"validation_attention/pieces_{number}", page, module.global_step)
        for kind, layers in self._layers.items():
            weights = torch.cat(maps[kind]).float().cpu().numpy()
            image = drawing.draw_attention(kind, weights, labels, layers, self._heads, f", validation pair {pair}")
            log.add_image(f"validation_attention/{kind}_{number}", image, module.global_step)

    def _write_embeddings(self, log: RunLog, module: TranslationModule) -> None:
        """Write the embeddings of the most frequent pieces for TensorBoard's projector, which shows one version."""
        vectors = module.network.embedding.weight.detach().cpu().float().numpy()[self._frequent_pieces]
        lines = ["piece\toccurrences\n"]
        for index in self._frequent_pieces:
            lines.append(f"{' '.join(self._pieces[index].split()) or '(space)'}\t{self._occurrences[index]}\n")
        config = (
            'embeddings { tensor_name: "pieces" tensor_path: "embeddings.bytes" metadata_path: "embeddings.tsv" '
            f"tensor_shape: {vectors.shape[0]} tensor_shape: {vectors.shape[1]} }}\n"
        )
        log.write(f"{EVENTS}/embeddings.bytes", vectors.astype("<f4").tobytes())
        log.write(f"{EVENTS}/embeddings.tsv", "".join(lines).encode())
        log.write(f"{EVENTS}/projector_config.pbtxt", config.encode())
