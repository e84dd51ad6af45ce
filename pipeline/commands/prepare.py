"""Raw parallel text -> corpus folder: cleaned, tokenized, memory-mapped.

Run again it changes nothing; with other texts or settings it says what differs. The last line is the manifest as
JSON; before it, on standard error, stands which pairs were dropped, and why.
"""

import argparse
import json
import sys
from pathlib import Path

from pipeline.config.arguments import add_recipe_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    add_recipe_arguments(parser)
    parser.add_argument("--force", action="store_true", help="make the corpus anew where texts or settings differ")
    parser.add_argument(
        "--init-from", type=Path, metavar="CHECKPOINT", help="take its tokenizer: for a run that begins from it"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prepare the recipe's corpus."""
    from data_module.corpus.manifest import summary
    from data_module.corpus.preparation import prepare
    from pipeline.config.recipe import load_recipe
    from pipeline.training.init_from import load_initial_weights

    recipe = load_recipe(arguments.config, arguments.overrides)
    tokenizer = load_initial_weights(arguments.init_from, recipe).tokenizer if arguments.init_from else None
    manifest = prepare(recipe.corpus, tokenizer, force=arguments.force)
    print(f"{summary(manifest)}\nthe corpus lies in {recipe.corpus.folder}", file=sys.stderr, flush=True)
    print(json.dumps(manifest))
    return 0
