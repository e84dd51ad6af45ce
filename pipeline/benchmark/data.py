"""Measure the data path alone: corpus preparation, epoch planning, padding and the throughput of one loader worker.

Reads the recipe's `corpus:` and `batches:`. A missing corpus is prepared first.
"""

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.config.arguments import add_recipe_arguments

if TYPE_CHECKING:
    from data_module.batching.batch_plan import EpochPlan
    from data_module.corpus.store import ParallelCorpus
    from data_module.settings import CorpusSettings
    from data_module.translation_data_module import TranslationDataModule

LARGE = 40_000_000
"""Pairs of the larger corpus whose planning is timed: the recipe's corpus, repeated."""
LOADED_STEPS = 300
"""Number of batches to load."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's arguments."""
    add_recipe_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure preparation, loading and planning, and print the JSON."""
    from data_module.batching.batch import SpecialIds
    from data_module.tokenization.tokenizer import Tokenizer
    from pipeline.config.recipe import load_recipe
    from pipeline.training.corpus import ensure_corpus

    recipe = load_recipe(arguments.config, arguments.overrides)
    ensure_corpus(recipe.corpus)
    folder = Path(recipe.corpus.folder)
    tokenizer = Tokenizer.load(folder / "tokenizer.model")
    figures = _preparation(recipe.corpus, tokenizer)

    from data_module.translation_data_module import TranslationDataModule

    special = SpecialIds(pad=tokenizer.pad_id, bos=tokenizer.bos_id, eos=tokenizer.eos_id)
    with _timed("opening the corpus") as seconds:
        data = TranslationDataModule(folder, recipe.batches, special, recipe.run.seed)
    figures["open_seconds"] = seconds[0]
    # Before anything else reads the corpus: pages that a process has mapped cannot be dropped.
    figures |= _loading(data, cold=True)
    figures |= _loading(data, cold=False)
    figures |= _plan(data)
    figures["peak_memory_bytes"] = _peak_memory()
    print(json.dumps({name: round(x, 4) if isinstance(x, float) else x for name, x in figures.items()}))
    return 0


def _preparation(settings: "CorpusSettings", tokenizer: Any) -> dict[str, Any]:
    """Clean, encode and write the corpus into a temporary folder, without training the tokenizer."""
    from data_module.corpus.builder import write_corpus
    from data_module.corpus.preparation import without_garbage_collection
    from data_module.readers.pairs import all_available, open_reader

    if not all_available(settings):
        return {"pairs_per_second": None}
    parent = Path(settings.folder).parent
    with tempfile.TemporaryDirectory(dir=parent, prefix=".benchmark-") as folder:
        with _timed("preparing, without the tokenizer") as seconds, without_garbage_collection():
            num_pairs = [open_reader(text, settings).count_pairs() for text in settings.train]
            manifest = write_corpus(settings, tokenizer, {}, num_pairs, Path(folder), progress=True)
        train = manifest["train"]
    return {
        "pairs": train["pairs_kept"],
        "target_tokens": train["target_tokens"],
        "pairs_per_second": train["pairs_read"] / seconds[0],
        "prepared_target_tokens_per_second": train["target_tokens"] / seconds[0],
        "prepare_peak_memory_bytes": _peak_memory(),
    }


def _plan(data: "TranslationDataModule") -> dict[str, Any]:
    """Plan the first epoch of the corpus and of the corpus repeated to `LARGE` pairs."""
    from data_module.batching.batch_plan import plan_epoch
    from data_module.corpus.store import lengths_with_eos

    corpus, settings = data.train_corpus, data.settings
    source, target = lengths_with_eos(corpus.source), lengths_with_eos(corpus.target)

    def plan(times: int) -> "EpochPlan":
        return plan_epoch(
            np.tile(source, times),
            np.tile(target, times),
            batch_tokens=settings.batch_tokens,
            group_tokens=data.group_tokens,
            seed=data.seed,
            epoch=0,
        )

    with _timed("planning an epoch") as seconds:
        epoch = plan(1)
    figures = {"group_tokens": data.group_tokens, "plan_seconds": seconds[0], **_padding(epoch, corpus, settings)}
    times = -(-LARGE // len(source))
    with _timed(f"planning an epoch of {times * len(source):,} pairs") as seconds:
        plan(times)
    return figures | {"plan_seconds_large": seconds[0], "plan_large_pairs": times * len(source)}


def _padding(epoch: "EpochPlan", corpus: "ParallelCorpus", settings: Any) -> dict[str, Any]:
    """Return counts of batches and groups, and how full of tokens they are."""
    batches = [epoch[index] for index in range(len(epoch))]
    groups = [group for batch in batches for group in batch]
    padded_tokens = np.array([(len(g.pairs) * g.source_length, len(g.pairs) * g.target_length) for g in groups])
    of_batch = np.add.reduceat(padded_tokens, np.cumsum([0, *map(len, batches[:-1])]), axis=0).max(axis=1)
    num_tokens = sum(len(side.tokens) + len(side) for side in (corpus.source, corpus.target))
    one_length = [bool((corpus.source.lengths[g.pairs] + 1 == g.source_length).all()) for g in groups]
    return {
        "batches": len(batches),
        "groups": len(groups),
        "pairs_planned": sum(len(group.pairs) for group in groups),
        "padding_share": 1.0 - num_tokens / float(padded_tokens.sum()),
        "largest_group_cells": int(padded_tokens.max()),
        "emptiest_batch": float(of_batch[:-1].min(initial=settings.batch_tokens)) / settings.batch_tokens,
        "groups_without_mask": sum(one_length) / len(groups),
    }


def _loading(data: "TranslationDataModule", *, cold: bool) -> dict[str, Any]:
    """Measure the throughput of one worker process, with the corpus on disk only (`cold`) or in memory."""
    data.settings = replace(data.settings, workers=1)
    if cold:
        _drop_pages(data.folder)
    suffix, prefix = (" from the disk", "cold_") if cold else ("", "")
    with _timed(f"the first batch{suffix}") as seconds:
        batches = iter(data.train_dataloader())
        next(batches)
    figures: dict[str, Any] = {f"{prefix}first_batch_seconds": seconds[0]}
    with _timed(f"{LOADED_STEPS} batches{suffix}") as seconds:
        tokens = sum(next(batches).num_target_tokens for _ in range(LOADED_STEPS))
    return figures | {f"{prefix}loader_target_tokens_per_second": tokens / seconds[0]}


def _drop_pages(folder: Path) -> None:
    """Drop the files' pages from the system's cache, except pages that a process maps."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _peak_memory() -> int:
    """Return this process's peak memory in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextmanager
def _timed(name: str) -> Iterator[list[float]]:
    """Time the block and print its duration; the yielded list holds the seconds afterwards."""
    seconds: list[float] = []
    started = time.perf_counter()
    yield seconds
    seconds.append(time.perf_counter() - started)
    print(f"{seconds[0]:9.3f} s  {name}", file=sys.stderr)
