"""At each validation, logs images of attention and position encodings, and embeddings for the projector."""

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
_PREFERRED_PIECES = 16
"""By default, sentences of about this length are drawn."""
_MAX_HEADS = 8
_MAX_COUNTED_TOKENS = 5_000_000
_MAX_POSITIONS = 128


class AttentionPlots(Callback):
    """Draws the attention of chosen validation pairs, on rank 0.

    Must come after `samples`, which collects the translations of the validation's `sources`, and before `EMA`, which
    restores the weights. `check_training` has checked that the layers and heads of `settings` exist. The training
    corpus gives the frequencies of pieces.
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
        self._pairs = self._default_pairs() if settings.attention_sentences is None else settings.attention_sentences
        depths = {"encoder": network.encoder_layers, "decoder": network.decoder_layers, "cross": network.decoder_layers}
        # If encoder and decoder differ in depth, a given layer may exist in only one of them.
        self._layers = {
            kind: [layer for layer in settings.attention_layers or sorted({0, depth - 1}) if layer < depth]
            for kind, depth in depths.items()
        }
        self._heads = settings.attention_heads or list(range(min(network.num_heads, _MAX_HEADS)))
        samples.keep(self._pairs)
        self._frequent_pieces = _most_frequent(corpus, tokenizer.vocabulary_size, settings.embedding_pieces)
        self._positions_drawn = False

    def _default_pairs(self) -> list[int]:
        """Return the two samples whose length is closest to the preferred one."""
        by_distance = sorted(self._samples.samples, key=lambda pair: abs(len(self._sources[pair]) - _PREFERRED_PIECES))
        return sorted(by_distance[:2])

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the images and write the projector's files."""
        log = trainer.logger
        if not isinstance(log, RunLog) or not log.writes:
            return
        assert isinstance(pl_module, TranslationModule)
        from pipeline.monitoring import attention_images  # Imports matplotlib, which other ranks do not need.

        for number, pair in enumerate(self._pairs, 1):
            self._log_attention(attention_images, log, pl_module, number, pair)
        if pl_module.network_settings.learned_positions or not self._positions_drawn:
            self._positions_drawn = True
            self._log_positions(attention_images, log, pl_module)
        self._write_embeddings(log, pl_module)

    def _log_attention(
        self, drawing: ModuleType, log: RunLog, module: TranslationModule, number: int, pair: int
    ) -> None:
        """Log the attention of a validation pair while the decoder is given its translation."""
        special, step = module.special, module.global_step
        source = [*self._sources[pair][: _MAX_PIECES - 1], special.eos]
        target = [piece for piece in self._samples.translation(pair).pieces if piece >= NUM_SPECIAL_IDS]
        target = target[: _MAX_PIECES - 1]
        previous = [special.bos, *target]
        maps = attention_maps(
            module.network,
            torch.tensor([source], device=module.device),
            torch.tensor([previous], device=module.device),
        )
        pieces = {"source": self._labels(source[:-1]), "target": self._labels(target)}
        labels = drawing.axis_labels(pieces["source"], pieces["target"], *self._labels([special.bos, special.eos]))
        if labels.note:
            rows = enumerate(zip_longest(*pieces.values(), fillvalue=""), 1)
            numbered = table(["number", *pieces], ((index, *row) for index, row in rows))
            log.add_text(f"validation_attention/pieces_{number}", f"{labels.note}\n\n{numbered}", step)
        for kind in drawing.AXES:
            if not self._layers[kind]:
                continue
            weights = [layer[0].float().cpu().numpy() for layer in maps[kind]]
            subject = f", validation pair {pair}"
            image = drawing.draw_attention(kind, weights, labels, self._layers[kind], self._heads, subject)
            log.add_image(f"validation_attention/{kind}_{number}", image, step)

    def _log_positions(self, drawing: ModuleType, log: RunLog, module: TranslationModule) -> None:
        positions = module.network.positions
        count = min(_MAX_POSITIONS, positions.max_positions or _MAX_POSITIONS)
        with torch.no_grad():
            table = positions(0, count).float().cpu().numpy()
        title, columns = f"learned positions, {table.shape[1]} dimensions", "dimension"
        if not module.network_settings.learned_positions:
            title = f"sinusoidal positions, {table.shape[1]} dimensions"
            columns = "sines (dimensions 0, 2, 4 …), then cosines (1, 3, 5 …)"
            table = np.concatenate((table[:, 0::2], table[:, 1::2]), axis=1)
        image = drawing.draw_matrix(title, table, "position", columns)
        log.add_image("validation_attention/positions", image, module.global_step)

    def _write_embeddings(self, log: RunLog, module: TranslationModule) -> None:
        """Write the embeddings of the most frequent pieces for TensorBoard's projector, which shows one version."""
        ids = [index for index, _ in self._frequent_pieces]
        rows = torch.tensor(ids, device=module.device)
        vectors = module.network.embedding.weight.detach()[rows].float().cpu().numpy()
        lines = ["piece\toccurrences"]
        for piece, (_, count) in zip(self._labels(ids), self._frequent_pieces, strict=True):
            lines.append(f"{' '.join(piece.split()) or '(space)'}\t{count}")
        log.write(f"{EVENTS}/embeddings.bytes", vectors.astype("<f4").tobytes())
        log.write(f"{EVENTS}/embeddings.tsv", ("\n".join(lines) + "\n").encode())
        log.write(
            f"{EVENTS}/projector_config.pbtxt",
            (
                'embeddings { tensor_name: "pieces" tensor_path: "embeddings.bytes" metadata_path: "embeddings.tsv" '
                f"tensor_shape: {vectors.shape[0]} tensor_shape: {vectors.shape[1]} }}\n"
            ).encode(),
        )

    def _labels(self, ids: list[int]) -> list[str]:
        return [self._pieces[index] for index in ids]


def _most_frequent(corpus: ParallelCorpus, vocabulary_size: int, count: int) -> list[tuple[int, int]]:
    """Return the ids of the most frequent pieces and how often they occur at the start of the corpus."""
    occurrences = np.bincount(corpus.source.tokens[:_MAX_COUNTED_TOKENS], minlength=vocabulary_size)
    occurrences += np.bincount(corpus.target.tokens[:_MAX_COUNTED_TOKENS], minlength=vocabulary_size)
    occurrences[:NUM_SPECIAL_IDS] = -1  # sorted last, so that they are never among the first `count`
    frequent = np.argsort(-occurrences, kind="stable")[: min(count, vocabulary_size - NUM_SPECIAL_IDS)]
    return [(int(index), int(occurrences[index])) for index in frequent]
