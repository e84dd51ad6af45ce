"""Clean and tokenize raw parallel text, and write it to the corpus folder.

If the folder holds this corpus already, nothing is changed; if it holds another one, the differences are reported. The
last line of the output is JSON: the folder and its numbers of pairs and tokens. How many pairs were dropped, and why,
goes to standard error. `manifest.json` in the folder holds all of it.
"""

import argparse
import json
import sys

from data_module.files import user_path
from pipeline.config.recipe import add_recipe_arguments


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
    from data_module.corpus.manifest import TOKENIZER_NAME, numbers, summary
    from data_module.corpus.preparation import prepare
    from data_module.tokenization.tokenizer import Tokenizer
    from pipeline.config.recipe import load_recipe
    from pipeline.inference.pieces import piece_report
    from pipeline.training.start import load_initial_weights

    recipe = load_recipe(arguments.config, arguments.overrides)
    with recipe.naming_places():
        tokenizer = load_initial_weights(arguments.init_from, recipe).tokenizer if arguments.init_from else None
        manifest = prepare(recipe.corpus, tokenizer, force=arguments.force)
        learned = Tokenizer.load(recipe.corpus_folder() / TOKENIZER_NAME).also_seen(tokenizer)
        for line, _ in piece_report(recipe.corpus, learned):
            print(line, file=sys.stderr)
    print(f"{summary(manifest)}\nthe corpus is in {recipe.corpus.folder}", file=sys.stderr, flush=True)
    print(json.dumps({"folder": recipe.corpus.folder, **numbers(manifest)}))
    return 0
