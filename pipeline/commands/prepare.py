"""Clean and tokenize raw parallel text, and write it to the corpus folder.

If the folder holds this corpus already, nothing is changed; if it holds another one, the differences are reported. The
last line of the output is JSON: the folder and its numbers of pairs and tokens. Standard error reports how many pairs
were dropped, and why. `manifest.json` in the folder holds all of this.
"""

import argparse
import json

from data_module.system.files import user_path
from pipeline.config.recipe import add_recipe_arguments, load_recipe
from pipeline.runtime.console import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_recipe_arguments(parser)
    parser.add_argument("--force", action="store_true", help="replace a corpus of other texts or settings")
    parser.add_argument(
        "--init-from",
        type=user_path,
        metavar="CHECKPOINT",
        help="use this checkpoint's tokenizer; for `fit --init-from`",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prepare the recipe's corpus and print its numbers."""
    recipe = load_recipe(arguments.config, arguments.overrides)
    with recipe.naming_places():
        from data_module.corpus.manifest import numbers  # numpy, which `--help` does without
        from pipeline.training.new_corpus import prepare_and_report

        tokenizer = None
        if arguments.init_from:
            from pipeline.training.start import load_initial_weights  # torch

            tokenizer = load_initial_weights(arguments.init_from, recipe).tokenizer
        manifest = prepare_and_report(recipe.corpus, tokenizer, arguments.force)
    say(f"the corpus is in {recipe.corpus.folder}")
    print(json.dumps({"folder": recipe.corpus.folder, **numbers(manifest)}))
    return 0
