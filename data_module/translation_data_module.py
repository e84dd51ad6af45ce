"""The LightningDataModule: connects corpus, batch plan and loaders."""

from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from data_module.batching.batch import RankBatch, SpecialIds, collate
from data_module.batching.batch_plan import LengthBucket, plan_in_order
from data_module.batching.plan_cache import PlanCache
from data_module.batching.stateful_loader import RankBatchDataset, StatefulLoader, identity
from data_module.corpus.store import ParallelCorpus, lengths_with_eos, open_corpus, read_ahead
from data_module.errors import InputError
from data_module.settings import BatchSettings


class TranslationDataModule(LightningDataModule):
    """Training batches by token count from a prepared corpus folder, and validation batches in fixed order.

    Training uses an endless `StatefulLoader`, which yields one `RankBatch` per optimizer step. Validation uses a loader
    of `RankBatch`es of one micro-batch each, divided among the ranks.
    """

    def __init__(self, folder: Path, settings: BatchSettings, special: SpecialIds, seed: int) -> None:
        super().__init__()
        self.folder = folder
        self.settings = settings
        self.special = special
        self.seed = seed
        self.train_corpus = open_corpus(folder, "train")
        self.validation_corpus = open_corpus(folder, "validation")
        self.longest = 1 + self.train_corpus.longest
        self.group_tokens = settings.group_tokens or max(settings.batch_tokens // 8, self.longest)
        self.micro_batch_tokens = settings.max_tokens_per_device or self.group_tokens
        if self.longest > min(self.group_tokens, self.micro_batch_tokens, settings.batch_tokens):
            raise InputError(
                f"the longest sentence of {folder} has {self.longest} tokens and does not fit in a batch; raise "
                "batches.batch_tokens, group_tokens or max_tokens_per_device, or lower corpus.max_tokens"
            )
        if self.group_tokens > settings.batch_tokens:
            raise InputError(
                f"batches.group_tokens {self.group_tokens} is more than batches.batch_tokens "
                f"{settings.batch_tokens}; lower it"
            )

    def train_dataloader(self) -> StatefulLoader:
        """Return an endless loader of one `RankBatch` per optimizer step."""
        rank, world_size = self._rank_and_size()
        if self.trainer is None or self.trainer.local_rank == 0:
            read_ahead(self.train_corpus)
        plans = PlanCache(
            self.train_corpus, batch_tokens=self.settings.batch_tokens, group_tokens=self.group_tokens, seed=self.seed
        )
        rank_batches = RankBatchDataset(
            self.train_corpus,
            plans,
            self.special,
            rank=rank,
            world_size=world_size,
            max_tokens=self.micro_batch_tokens,
        )
        return StatefulLoader(rank_batches, workers=self.settings.workers, pin_memory=torch.cuda.is_available())

    def val_dataloader(self) -> DataLoader[RankBatch]:
        """Return a loader of this rank's part of the validation pairs, longest first. Ranks have disjoint parts."""
        rank, world_size = self._rank_and_size()
        corpus = self.validation_corpus
        buckets = plan_in_order(
            lengths_with_eos(corpus.source),
            lengths_with_eos(corpus.target),
            self.micro_batch_tokens,
        )
        return DataLoader(
            _BucketDataset(corpus, buckets, self.special, rank, world_size),
            batch_size=None,
            collate_fn=identity,  # type: ignore[arg-type]
            generator=torch.Generator().manual_seed(0),
        )

    def validation_text(self) -> tuple[list[str], list[str]]:
        """Return the validation sources and references as text, one sentence per pair."""
        source, target = (
            (self.folder / f"validation.{side}.txt").read_text(encoding="utf-8").split("\n")[:-1]
            for side in ("source", "target")
        )
        return source, target

    def _rank_and_size(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer is not None else (0, 1)


class _BucketDataset(Dataset[RankBatch]):
    """One rank's validation batches: one length bucket each, and a filler batch where other ranks have one more."""

    def __init__(
        self, corpus: ParallelCorpus, buckets: list[LengthBucket], special: SpecialIds, rank: int, world_size: int
    ) -> None:
        self._corpus, self._special = corpus, special
        self._buckets = buckets[rank::world_size]
        # Every rank needs the same number of batches, because ranks communicate between batches.
        self._num_batches = -(-len(buckets) // world_size)
        self._filler = buckets[0]._replace(pairs=buckets[0].pairs[:1])

    def __len__(self) -> int:
        return self._num_batches

    def __getitem__(self, index: int) -> RankBatch:
        if index >= self._num_batches:
            raise IndexError(index)
        is_filler = index >= len(self._buckets)
        bucket = self._filler if is_filler else self._buckets[index]
        tokens = int(self._corpus.target.lengths[bucket.pairs].sum()) + len(bucket.pairs)
        return collate(self._corpus, [bucket], self._special, num_target_tokens=tokens, is_filler=is_filler)
