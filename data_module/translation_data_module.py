"""The LightningDataModule: connects corpus, batch plan and loaders."""

from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from numpy.typing import NDArray

from data_module.batch import (
    GPU_BATCH_TOKENS,
    PaddedBatch,
    RowShape,
    SpecialIds,
    length_batches,
    pad_batch,
)
from data_module.batch_plan import Epochs, fewest_pairs
from data_module.corpus.manifest import SplitSources, read_manifest, split_sources
from data_module.corpus.store import (
    ParallelCorpus,
    TokenStore,
    lengths_with_eos,
    open_corpus,
    open_variants,
)
from data_module.errors import InputError
from data_module.rank_rows import row_shape
from data_module.settings import BatchSettings, CorpusSettings
from data_module.stateful_loader import RankBatchDataset, StatefulLoader
from data_module.system.text_files import open_file


class TranslationDataModule(LightningDataModule):
    """Training batches by token count from a prepared corpus folder, and validation batches in fixed order.

    Training uses an endless `StatefulLoader`, which yields one `RankBatch` per optimizer step. Validation uses
    `PaddedBatch`es, divided among the ranks.
    """

    def __init__(
        self,
        folder: Path,
        settings: BatchSettings,
        special: SpecialIds,
        seed: int,
        corpus_settings: CorpusSettings | None = None,
        constant_rows: bool = True,
        validation_translations: int | None = None,
    ) -> None:
        """Open a prepared corpus; raise InputError when its longest sentence does not fit in a batch.

        `settings`, `corpus_settings` and `validation_translations` are the recipe's `batches:`, `corpus:` and
        `run.validation_translations`; without `corpus_settings`, which have the weights of the sources, each pair
        occurs once an epoch. `seed` is that of the order of pairs. For `constant_rows`, see `RowShape.constant`.
        """
        super().__init__()
        self.folder = folder
        self.settings = settings
        self.special = special
        self.seed = seed
        self.constant_rows = constant_rows
        self.train_variants = open_variants(folder)
        """The encodings of the training pairs that epochs take in turn."""
        self.train_corpus = self.train_variants[0]
        self.validation_corpus = open_corpus(folder, "validation")
        for corpus in (*self.train_variants, self.validation_corpus):
            corpus.map_all()
        num_pairs = len(self.validation_corpus)
        num_translated = num_pairs if validation_translations is None else min(validation_translations, num_pairs)
        self.translated_pairs = [index * num_pairs // num_translated for index in range(num_translated)]
        """The validation pairs whose sources are translated, evenly spread over the text."""
        self._weights = epoch_weights(folder, corpus_settings) if corpus_settings else ((), ())
        if self._weights[0] and not fewest_pairs(*self._weights):
            raise InputError("corpus.train: an epoch may have no pairs with these weights; raise one")
        self.longest = 1 + max(variant.longest for variant in self.train_variants)
        self.row_shape(1)  # Raises for a limit that is too small.

    def row_shape(self, world_size: int) -> RowShape:
        """Return the shape of each rank's micro-batches."""
        try:
            return row_shape(
                self._mean_lengths,
                self.longest,
                batch_tokens=self.settings.batch_tokens,
                max_tokens_per_device=self.settings.max_tokens_per_device,
                world_size=world_size,
                constant=self.constant_rows,
            )
        except ValueError as error:
            raise InputError(f"{self.folder}: {error}") from None

    def train_dataloader(self) -> StatefulLoader:
        """Return an endless loader of one `RankBatch` per optimizer step."""
        rank, world_size = self._rank_and_size()
        rank_batches = RankBatchDataset(
            self.epochs(), self.special, rank=rank, world_size=world_size, shape=self.row_shape(world_size)
        )
        return StatefulLoader(rank_batches, workers=self.settings.workers, pin_memory=torch.cuda.is_available())

    @cached_property
    def _mean_lengths(self) -> tuple[float, float]:
        """Mean lengths of source and target in training, including EOS."""
        source, target = (
            fmean(_mean_length(side, *self._weights) for side in sides)
            for sides in zip(*((variant.source, variant.target) for variant in self.train_variants), strict=True)
        )
        return 1.0 + source, 1.0 + target

    def epochs(self) -> Epochs:
        """Return the epochs of the training corpus."""
        return Epochs(
            self.train_variants, batch_tokens=self.settings.batch_tokens, seed=self.seed, weights=self._weights
        )

    def val_dataloader(self) -> "ValidationBatches":
        """Return this rank's part of the validation pairs. Ranks have disjoint parts.

        All pairs of a batch come from one source, and all or none of them are translated. Translated batches come
        first, so that ranks have equally many of them, and longer ones before shorter ones.
        """
        rank, world_size = self._rank_and_size()
        corpus, settings = self.validation_corpus, self.settings
        limit = min(settings.batch_tokens // 8, settings.max_tokens_per_device or settings.batch_tokens)
        on_gpu = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        if on_gpu:
            limit = max(limit, min(GPU_BATCH_TOKENS, settings.max_tokens_per_device or GPU_BATCH_TOKENS))
        if self.trainer is not None and world_size > 1:
            # Ranks divide the same batches, also if their devices have other limits.
            least = torch.tensor(limit, device=self.trainer.strategy.root_device)
            limit = int(self.trainer.strategy.reduce(least, reduce_op="min"))
        lengths = np.maximum(lengths_with_eos(corpus.source), lengths_with_eos(corpus.target)).astype(np.int64)
        batches: list[tuple[NDArray[np.int64], bool]] = []
        for of_source in self._validation_pairs_by_source():
            is_translated = np.isin(of_source, self.translated_pairs)
            for translated, pairs in ((True, of_source[is_translated]), (False, of_source[~is_translated])):
                of_kind = length_batches(lengths[pairs].tolist(), max(limit, self.longest), avoids_masks=not on_gpu)
                batches += [(pairs[batch], translated) for batch in of_kind]
        batches.sort(key=lambda batch: (not batch[1], -lengths[batch[0][0]]))
        return ValidationBatches(corpus, batches, self.special, rank, world_size)

    def validation_text(self) -> tuple[list[str], list[str]]:
        """Return the validation sources and references as text, one sentence per pair.

        Raises InputError if they are not text, or not as many as the pairs.
        """

        def read(side: str) -> list[str]:
            path = self.folder / f"validation.{side}.txt"
            with open_file(path) as file, suppress(UnicodeDecodeError):  # It is refused below.
                lines = [line.decode().removesuffix("\n") for line in file]
                if len(lines) == len(self.validation_corpus):
                    return lines
            raise InputError(f"{path}: does not match the corpus; run prepare with --force")

        return read("source"), read("target")

    def validation_sources(self) -> SplitSources | None:
        """Return which validation pairs come from which source; None if there is one source only."""
        return split_sources(read_manifest(self.folder)["validation"])

    def _validation_pairs_by_source(self) -> list[NDArray[np.int64]]:
        """Return the indices of the pairs of each source that has any."""
        sources = self.validation_sources()
        if sources is None:
            return [np.arange(len(self.validation_corpus))]
        by_source = (np.flatnonzero(sources.of_pair == index) for index in range(len(sources.names)))
        return [pairs for pairs in by_source if len(pairs)]

    def _rank_and_size(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer is not None else (0, 1)


def _mean_length(store: TokenStore, num_pairs: tuple[int, ...], weights: tuple[float, ...]) -> float:
    """Return the mean number of tokens of a side's sentences in an epoch; without weights each occurs once."""
    if not weights:
        return len(store.tokens) / len(store)
    tokens, sentences, first = 0.0, 0.0, 0
    for size, weight in zip(num_pairs, weights, strict=True):
        tokens += weight * float(store.lengths[first : first + size].sum(dtype=np.int64))
        sentences += weight * size
        first += size
    return tokens / sentences


def epoch_weights(folder: Path, settings: CorpusSettings) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return the number of pairs of each training source, repetitions included, and its weight; empty if all are 1."""
    weights = tuple(text.weight for text in settings.train)
    if all(weight == 1 for weight in weights):
        return (), ()
    sources = read_manifest(folder)["train"]["sources"]
    return tuple(source["pairs"] * source["repeat"] for source in sources), weights


class ValidationBatches:
    """One rank's validation batches, and a filler where other ranks have one more."""

    def __init__(
        self,
        corpus: ParallelCorpus,
        batches: list[tuple[NDArray[np.int64], bool]],
        special: SpecialIds,
        rank: int,
        world_size: int,
    ) -> None:
        """Take all ranks' batches: the indices of their pairs, and whether they are translated."""
        self._corpus, self._special = corpus, special
        self._batches = batches[rank::world_size]
        # Every rank needs the same number of batches, because ranks communicate between batches.
        self._num_batches = -(-len(batches) // world_size)
        self._filler = batches[0][0][:1], batches[0][1]

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[PaddedBatch]:
        yield from (pad_batch(self._corpus, pairs, self._special, translated) for pairs, translated in self._batches)
        if len(self._batches) < self._num_batches:
            pairs, translated = self._filler
            yield pad_batch(self._corpus, pairs, self._special, translated, is_filler=True)
