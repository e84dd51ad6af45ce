"""Pictures at validations: what the network attends to, its positions, and its embeddings as points in space."""

from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from data_module.corpus.store import ParallelCorpus
from data_module.errors import InputError
from data_module.tokenization.tokenizer import NUM_SPECIAL_IDS, Tokenizer
from model.attention_maps import attention_maps
from model.settings import NetworkSettings
from model.translation_module import TranslationModule
from pipeline.checkpointing.run_folder import EVENTS
from pipeline.config.settings import MonitoringSettings
from pipeline.monitoring.heatmaps import Panel, heat_maps, matrix_picture
from pipeline.monitoring.run_log import RunLog
from pipeline.monitoring.validation_samples import ValidationSamples

_LONGEST, _LONGEST_SOUGHT = 40, 16
"""Pieces of a sentence that are drawn at most; sentences are chosen among those of about so many."""
_MOST_HEADS, _ACROSS = 8, 4
_TOKENS_COUNTED = 5_000_000
_POSITIONS = 128
_WHAT = {
    "encoder": ("a source piece (left) looks at the source (top)", "source", "source"),
    "decoder": ("for the piece to come (left) it looks at those before (top)", "said", "heard"),
    "cross": ("for the piece to come (left) it looks at the source (top)", "said", "source"),
}


class AttentionPlots(Callback):
    """Draws on rank 0 at validations. Stands behind `texts`, and before what swaps weights back."""

    @property
    def state_key(self) -> str:
        """Key of the state in checkpoints: the class name in version 0.1.0."""
        return "Pictures"

    def __init__(
        self,
        settings: MonitoringSettings,
        texts: ValidationSamples,
        sources: list[str],
        tokenizer: Tokenizer,
        corpus: ParallelCorpus,
        network: NetworkSettings,
    ) -> None:
        """Raises InputError for a sentence, layer or head that is not there."""
        self._texts, self._names = texts, tokenizer.pieces()
        self._sources = [ids.tolist() for ids in tokenizer.encode(sources)]
        self._pairs = settings.attention_sentences or self._default_pairs()
        self._layers = settings.attention_layers or sorted({0, network.num_layers - 1})
        self._heads = settings.attention_heads or list(range(min(network.num_heads, _MOST_HEADS)))
        chosen = {
            "attention_sentences": (self._pairs, len(sources)),
            "attention_layers": (self._layers, network.num_layers),
            "attention_heads": (self._heads, network.num_heads),
        }
        for name, (indices, count) in chosen.items():
            if max(indices) >= count:
                raise InputError(f"monitoring.{name}: there is no {max(indices)}; the last is {count - 1}")
        texts.keep(self._pairs)
        counts = np.bincount(corpus.source.tokens[:_TOKENS_COUNTED], minlength=tokenizer.vocabulary_size)
        counts += np.bincount(corpus.target.tokens[:_TOKENS_COUNTED], minlength=tokenizer.vocabulary_size)
        counts[:NUM_SPECIAL_IDS] = -1
        frequent = np.argsort(-counts, kind="stable")[: min(settings.embedding_pieces, len(counts) - NUM_SPECIAL_IDS)]
        self._frequent = [(int(index), int(counts[index])) for index in frequent]
        self._positions_drawn = False

    def _default_pairs(self) -> list[int]:
        """The two shown sentences whose length is best to look at."""
        by_distance = sorted(self._texts.samples, key=lambda pair: abs(len(self._sources[pair]) - _LONGEST_SOUGHT))
        return sorted(by_distance[:2])

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw."""
        log = trainer.logger
        if not isinstance(log, RunLog) or not log.writes or trainer.sanity_checking:
            return
        assert isinstance(pl_module, TranslationModule)
        for number, pair in enumerate(self._pairs):
            self._attention(log, pl_module, number, pair, trainer.global_step)
        if pl_module.network_settings.learned_positions or not self._positions_drawn:
            self._positions_drawn = True
            self._positions(log, pl_module, trainer.global_step)
        self._embeddings(log, pl_module)

    def _attention(self, log: RunLog, module: TranslationModule, number: int, pair: int, step: int) -> None:
        special = module.special
        source = [*self._sources[pair][: _LONGEST - 1], special.eos]
        pieces = [piece for piece in self._texts.translation(pair).pieces if piece >= NUM_SPECIAL_IDS]
        pieces = pieces[: _LONGEST - 1]
        heard, said = [special.bos, *pieces], [*pieces, special.eos]
        maps = attention_maps(
            module.network,
            torch.tensor([source], device=module.device),
            torch.tensor([heard], device=module.device),
        )
        names = {"source": self._named(source), "said": self._named(said), "heard": self._named(heard)}
        for kind, (what, rows, columns) in _WHAT.items():
            panels = [
                Panel(
                    f"layer {layer + 1}, head {head + 1}",
                    maps[kind][layer][0, head].float().cpu().numpy(),
                    names[rows],
                    names[columns],
                )
                for layer in self._layers
                for head in self._heads
            ]
            across = min(_ACROSS, len(self._heads))
            title = f"{kind} attention, validation pair {pair}\n{what}"
            log.add_picture(f"attention/{kind}_{number + 1}", heat_maps(title, panels, across), step)

    def _positions(self, log: RunLog, module: TranslationModule, step: int) -> None:
        positions = module.network.positions
        count = min(_POSITIONS, positions.max_positions or _POSITIONS)
        with torch.no_grad():
            table = positions(0, count).float().cpu().numpy()
        title, columns = f"learned positions, {table.shape[1]} dimensions", "dimension"
        if not module.network_settings.learned_positions:
            title = f"sinusoidal positions, {table.shape[1]} dimensions"
            columns = "sines (dimensions 0, 2, 4 …), then cosines (1, 3, 5 …)"
            table = np.concatenate((table[:, 0::2], table[:, 1::2]), axis=1)
        log.add_picture("attention/positions", matrix_picture(title, table, "position", columns), step)

    def _embeddings(self, log: RunLog, module: TranslationModule) -> None:
        """The projector's files, always the newest."""
        rows = torch.tensor([index for index, _ in self._frequent], device=module.device)
        vectors = module.network.embedding.weight.detach()[rows].float().cpu().numpy()
        labels = zip(self._named([index for index, _ in self._frequent]), self._frequent, strict=True)
        lines = ["piece\toccurrences", *(f"{_one_cell(piece)}\t{count}" for piece, (_, count) in labels)]
        log.write(f"{EVENTS}/embeddings.bytes", vectors.astype("<f4").tobytes())
        log.write(f"{EVENTS}/embeddings.tsv", ("\n".join(lines) + "\n").encode())
        log.write(
            f"{EVENTS}/projector_config.pbtxt",
            (
                'embeddings { tensor_name: "pieces" tensor_path: "embeddings.bytes" metadata_path: "embeddings.tsv" '
                f"tensor_shape: {vectors.shape[0]} tensor_shape: {vectors.shape[1]} }}\n"
            ).encode(),
        )

    def _named(self, ids: list[int]) -> list[str]:
        return [self._names[index] for index in ids]

    def state_dict(self) -> dict[str, Any]:
        """Carried over a resume."""
        return {"positions_drawn": self._positions_drawn}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As `state_dict` gave it."""
        self._positions_drawn = state_dict["positions_drawn"]


def _one_cell(piece: str) -> str:
    return " ".join(piece.split()) or "(space)"
