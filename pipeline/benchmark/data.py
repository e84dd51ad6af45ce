"""Measure the data path alone: preparation, planning, division among ranks and the throughput of one loader worker.

Reads the recipe's `corpus:` and `batches:`. A missing corpus is prepared first. Preparation writes all
`corpus.variants`, and counts each pair once.
"""

import argparse
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

from pipeline.config.recipe import add_recipe_arguments

if TYPE_CHECKING:
    from data_module.settings import CorpusSettings
    from data_module.translation_data_module import TranslationDataModule

LARGE = 40_000_000
"""Pairs of the larger corpus whose planning is timed: the recipe's corpus, repeated."""
LOADED_STEPS = 300
"""Number of batches to load."""
DIVIDED_TOKENS, DIVIDED_RANKS, DIVISIONS = 400_000, 128, 20
"""A large batch and job, for which the division of a batch is timed, and how often it is repeated."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's arguments."""
    add_recipe_arguments(parser)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure preparation, loading and planning, and return the figures."""
    from data_module.tokenization.tokenizer import Tokenizer
    from pipeline.config.recipe import load_recipe
    from pipeline.training.fit import ensure_corpus

    recipe = load_recipe(arguments.config, arguments.overrides)
    ensure_corpus(recipe.corpus)
    folder = Path(recipe.corpus.folder)
    tokenizer = Tokenizer.load(folder / "tokenizer.model")
    figures = _preparation(recipe.corpus, tokenizer)

    # Imported after the preparation, whose peak memory would include these packages.
    from data_module.translation_data_module import TranslationDataModule
    from pipeline.training.build import special_ids

    batches = replace(recipe.batches, workers=1)
    data = TranslationDataModule(
        folder, batches, special_ids(tokenizer), recipe.run.seed, corpus_settings=recipe.corpus
    )
    figures |= _loading(data)
    figures |= _plan(data)
    figures |= _division(data)
    figures["peak_memory_bytes"] = _peak_memory()
    return figures


def _preparation(settings: "CorpusSettings", tokenizer: Any) -> dict[str, Any]:
    """Clean, encode and write the corpus into a temporary folder, without training the tokenizer."""
    from data_module.corpus.builder import write_corpus
    from data_module.corpus.pairs import all_available, open_reader
    from data_module.corpus.preparation import without_garbage_collection

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

    lengths = [lengths_with_eos(side) for side in (data.train_corpus.source, data.train_corpus.target)]
    figures: dict[str, Any] = {}
    for suffix, times in (("", 1), ("_large", -(-LARGE // len(data.train_corpus)))):
        source, target = (np.tile(side, times) for side in lengths)
        with _timed(f"planning an epoch of {len(source):,} pairs") as seconds:
            plan_epoch(source, target, batch_tokens=data.settings.batch_tokens, seed=data.seed, epoch=0)
        figures |= {f"pairs_planned{suffix}": len(source), f"plan_seconds{suffix}": seconds[0]}
    return figures


def _division(data: "TranslationDataModule") -> dict[str, Any]:
    """Measure a loader's processor time for dividing a large batch of the corpus, which is repeated to its size."""
    from data_module.batching.batch_plan import plan_epoch
    from data_module.batching.rank_rows import rank_rows, row_shape
    from data_module.corpus.store import lengths_with_eos

    source, target = (lengths_with_eos(side) for side in (data.train_corpus.source, data.train_corpus.target))
    tokens = max(DIVIDED_TOKENS, data.longest)
    times = -(-2 * tokens // int(max(source.sum(), target.sum())))
    source, target = np.tile(source, times), np.tile(target, times)
    pairs = plan_epoch(source, target, batch_tokens=tokens, seed=data.seed, epoch=0)[0]
    shape = row_shape(
        (float(source.mean()), float(target.mean())),
        data.longest,
        batch_tokens=tokens,
        max_tokens_per_device=None,
        world_size=DIVIDED_RANKS,
        in_blocks=False,
    )
    started = time.process_time()
    for _ in range(DIVISIONS):
        rank_rows(source[pairs], target[pairs], shape, DIVIDED_RANKS, rank=0)
    seconds = (time.process_time() - started) / DIVISIONS
    print(f"{seconds:9.4f} s  of a processor: dividing {tokens:,} tokens among {DIVIDED_RANKS} ranks", file=sys.stderr)
    return {"division_processor_seconds": seconds}


def _loading(data: "TranslationDataModule") -> dict[str, Any]:
    """Measure the throughput of one worker process."""
    batches = iter(data.train_dataloader())
    next(batches)
    with _timed(f"loading {LOADED_STEPS} batches") as seconds:
        tokens = sum(next(batches).num_target_tokens for _ in range(LOADED_STEPS))
    return {"loader_target_tokens_per_second": tokens / seconds[0]}


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
