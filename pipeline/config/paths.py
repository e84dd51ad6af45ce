"""Prints a recipe's run folder and the source and reference that it is scored on, a line each, for scripts."""

import argparse
import sys
from pathlib import Path

from data_module.errors import InputError
from pipeline.config.arguments import add_recipe_arguments
from pipeline.config.recipe import Recipe, load_recipe
from pipeline.runtime.console import use_utf8


def recipe_paths(recipe: Recipe) -> tuple[Path, Path, Path]:
    """Return run folder, source and reference.

    The latter are the recipe's first test text if that is two files, else its validation text.
    """
    for text in recipe.corpus.test:
        if text.source and text.target:
            return recipe.run_folder(), Path(text.source), Path(text.target)
    folder = Path(recipe.corpus.folder)
    return recipe.run_folder(), folder / "validation.source.txt", folder / "validation.target.txt"


def main() -> int:
    """Print the paths; return the exit code."""
    use_utf8()
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add_recipe_arguments(parser)
    arguments, overrides = parser.parse_known_args()
    try:
        print(*recipe_paths(load_recipe(arguments.config, overrides)), sep="\n")
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
