"""Measure the data path alone: corpus preparation, epoch planning, padding and the throughput of one loader worker.

Reads the recipe's `corpus:` and `batches:`. A missing corpus is prepared first. For 1, 8 and 64 ranks the JSON has, of
rows end to end, the lengths of a rank's rows and the share of dead tokens in them, and the median over batches of how
much more the most expensive rank's part costs than the mean. If the recipe has views, the first one is written too.
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
    from data_module.settings import CorpusSettings
    from data_module.translation_data_module import TranslationDataModule

LARGE = 40_000_000
"""Pairs of the larger corpus whose planning is timed: the recipe's corpus, repeated."""
LOADED_STEPS = 300
"""Number of batches to load."""
WORLD_SIZES = (1, 8, 64)
"""Numbers of ranks that batches are divided among."""
DIVIDED_BATCHES = 100
"""About how many batches are divided."""


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
        data = TranslationDataModule(folder, recipe.batches, special, recipe.run.seed, corpus_settings=recipe.corpus)
    figures["open_seconds"] = seconds[0]
    # Before anything else reads the corpus: pages that a process has mapped cannot be dropped.
    figures |= _loading(data, cold=True)
    figures |= _loading(data, cold=False)
    figures |= _plan(data)
    figures |= _view(data)
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
            seed=data.seed,
            epoch=0,
        )

    with _timed("planning an epoch") as seconds:
        epoch = plan(1)
    figures: dict[str, Any] = {"batches": len(epoch), "pairs_planned": len(source), "plan_seconds": seconds[0]}
    for world_size in WORLD_SIZES:
        figures |= _rows(epoch, data, world_size)
    times = -(-LARGE // len(source))
    with _timed(f"planning an epoch of {times * len(source):,} pairs") as seconds:
        plan(times)
    return figures | {"plan_seconds_large": seconds[0], "plan_large_pairs": times * len(source)}


def _view(data: "TranslationDataModule") -> dict[str, Any]:
    """Write the view of the first epoch to a temporary folder, if the recipe has views."""
    if data.views is None:
        return {}
    with tempfile.TemporaryDirectory() as folder, _timed("writing the view of an epoch") as seconds:
        data.views.write(0, Path(folder))
    return {"view_seconds": seconds[0], "view_pairs_per_second": len(data.train_corpus) / seconds[0]}


def _rows(epoch: "EpochPlan", data: "TranslationDataModule", world_size: int) -> dict[str, Any]:
    """Return how full of tokens the rows of this many ranks are, and how evenly they share the cost of a batch."""
    from data_module.batching.rank_rows import cost, rank_rows

    shape, imbalance, num_rows, num_tokens = data.row_shape(world_size), [], 0, 0
    step = max(1, len(epoch) // DIVIDED_BATCHES)
    for index in range(0, len(epoch), step):
        pairs = epoch[index]
        source, target = (
            side.lengths[pairs].astype(np.int64) + 1 for side in (data.train_corpus.source, data.train_corpus.target)
        )
        ranks = rank_rows(source, target, shape, world_size)
        costs = [sum(float(cost(source[row], target[row]).sum()) for row in rows) for rows in ranks]
        imbalance.append(max(costs) * world_size / sum(costs) - 1.0)
        num_rows += sum(map(len, ranks))
        num_tokens += int(source.sum() + target.sum())
    name = f"_{world_size}_ranks"
    return {
        f"row_tokens{name}": [shape.source_tokens, shape.target_tokens],
        f"padding_share{name}": 1.0 - num_tokens / (num_rows * (shape.source_tokens + shape.target_tokens)),
        f"imbalance{name}": float(np.median(imbalance)),
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
