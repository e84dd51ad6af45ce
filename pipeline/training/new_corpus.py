"""Prepares a corpus and reports on its pieces and pairs, for `prepare` and `fit`."""

import json
from pathlib import Path

from data_module.corpus.manifest import Manifest, numbers, summary
from data_module.corpus.preparation import prepare
from data_module.settings import CorpusSettings
from data_module.tokenization.tokenizer import TOKENIZER_NAME, Tokenizer
from pipeline.config.recipe import Recipe
from pipeline.inference.pieces import piece_report
from pipeline.runtime.console import say


def prepare_and_report(settings: CorpusSettings, tokenizer: Tokenizer | None, force: bool = False) -> Manifest:
    """Prepare the corpus, and report on its pieces and pairs; return the manifest."""
    manifest = prepare(settings, tokenizer, force=force)
    # The weights with which training begins have learned the pieces of their tokenizer.
    learned = Tokenizer.load(Path(settings.folder) / TOKENIZER_NAME).also_seen(tokenizer)
    for line in (*(line for line, _ in piece_report(settings, learned)), *summary(manifest).splitlines()):
        say(line)
    return manifest


def print_new_corpus(recipe: Recipe, init_from: Path | None, force: bool) -> None:
    """Run the command `prepare` with a recipe that has been checked; see `prepare` for its options.

    Raises InputError as `prepare` and `load_initial_weights` do.
    """
    tokenizer = None
    if init_from:
        from pipeline.training.start import load_initial_weights  # imports torch

        tokenizer = load_initial_weights(init_from, recipe).tokenizer
    manifest = prepare_and_report(recipe.corpus, tokenizer, force)
    say(f"the corpus is in {recipe.corpus.folder}")
    print(json.dumps({"folder": recipe.corpus.folder, **numbers(manifest)}))
