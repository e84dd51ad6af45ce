"""Measure the data path alone: preparation, planning and the throughput of one loader worker.

Reads the recipe's `corpus:` and `batches:`. A missing corpus is prepared first. Preparation writes all
`corpus.variants`, and counts each pair once.
"""

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from data_module.batch_plan import plan_epoch
from data_module.corpus.builder import write_corpus
from data_module.corpus.checks import check_text
from data_module.corpus.pairs import all_available
from data_module.corpus.preparation import without_garbage_collection
from data_module.corpus.store import lengths_with_eos
from data_module.settings import CorpusSettings
from data_module.system.files import PlainValues
from data_module.tokenization.tokenizer import Tokenizer
from data_module.translation_data_module import TranslationDataModule
from pipeline.config.recipe import add_recipe_arguments, load_recipe
from pipeline.training.build import special_ids
from pipeline.training.new_corpus import ensure_corpus

LARGE = 40_000_000
"""Pairs whose planning is timed: the recipe's corpus, repeated."""
LOADED_STEPS = 300
"""Number of batches to load."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)


def run(arguments: argparse.Namespace) -> PlainValues:
    recipe = load_recipe(arguments.config, arguments.overrides)
    ensure_corpus(recipe.corpus)
    folder = Path(recipe.corpus.folder)
    tokenizer = Tokenizer.load(folder / "tokenizer.model")
    figures = _preparation(recipe.corpus, tokenizer)
    batches, ids = replace(recipe.batches, workers=1), special_ids(tokenizer)
    data = TranslationDataModule(folder, batches, ids, recipe.run.seed, corpus_settings=recipe.corpus)
    return {**figures, **_loading(data), **_plan(data)}


def _preparation(settings: CorpusSettings, tokenizer: Tokenizer) -> PlainValues:
    """Clean, encode and write the corpus into a temporary folder, without training the tokenizer."""
    if not all_available(settings):
        return {"pairs_per_second": None}
    parent = Path(settings.folder).parent
    checked = check_text(settings)
    with tempfile.TemporaryDirectory(dir=parent, prefix=".benchmark-") as folder, without_garbage_collection():
        started = time.perf_counter()
        train = write_corpus(settings, tokenizer, {}, checked, Path(folder), progress=True)["train"]
        seconds = _seconds_since(started, "preparing, without the tokenizer")
    return {
        "pairs": train["pairs_kept"],
        "target_tokens": train["target_tokens"],
        "pairs_per_second": train["pairs_read"] / seconds,
    }


def _loading(data: TranslationDataModule) -> PlainValues:
    """Measure the throughput of one worker process."""
    batches = iter(data.train_dataloader())
    next(batches)
    started = time.perf_counter()
    tokens = sum(next(batches).num_target_tokens for _ in range(LOADED_STEPS))
    seconds = _seconds_since(started, f"loading {LOADED_STEPS} batches")
    return {"loader_target_tokens_per_second": tokens / seconds}


def _plan(data: TranslationDataModule) -> PlainValues:
    """Plan an epoch of the corpus repeated to `LARGE` pairs."""
    corpus, times = data.train_corpus, -(-LARGE // len(data.train_corpus))
    source, target = (np.tile(lengths_with_eos(side), times) for side in (corpus.source, corpus.target))
    started = time.perf_counter()
    plan_epoch(source, target, batch_tokens=data.settings.batch_tokens, seed=data.seed, epoch=0)
    seconds = _seconds_since(started, f"planning an epoch of {len(source):,} pairs")
    return {"pairs_planned": len(source), "plan_seconds": seconds}


def _seconds_since(started: float, name: str) -> float:
    """Return the seconds since a reading of the clock, and print them."""
    seconds = time.perf_counter() - started
    print(f"{seconds:9.3f} s  {name}", file=sys.stderr)
    return seconds
