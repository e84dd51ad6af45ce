"""What `prepare` does when the recipe has no mistake: the corpus, a report on its pieces, and its numbers."""

import json
import sys
from pathlib import Path

from data_module.corpus.manifest import numbers, summary
from data_module.corpus.preparation import prepare
from pipeline.config.recipe import Recipe
from pipeline.inference.pieces import corpus_report


def prepare_and_report(recipe: Recipe, init_from: Path | None, force: bool) -> None:
    """Prepare the recipe's corpus and print its numbers.

    Args:
        recipe: the recipe.
        init_from: a checkpoint, run folder or Marian model whose tokenizer the corpus gets; None for none.
        force: replace a corpus of other texts or settings.

    Raises InputError as `prepare` and `load_initial_weights` do.
    """
    tokenizer = None
    if init_from is not None:
        from pipeline.training.start import load_initial_weights  # It imports torch, which the rest does without.

        tokenizer = load_initial_weights(init_from, recipe).tokenizer
    manifest = prepare(recipe.corpus, tokenizer, force=force)
    for line, _ in corpus_report(recipe.corpus, tokenizer):
        print(line, file=sys.stderr)
    print(f"{summary(manifest)}\nthe corpus is in {recipe.corpus.folder}", file=sys.stderr, flush=True)
    print(json.dumps({"folder": recipe.corpus.folder, **numbers(manifest)}))
