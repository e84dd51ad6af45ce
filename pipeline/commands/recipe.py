"""List the recipes that come with the program, copy one to change it, or print a recipe's paths.

`recipe list` prints a name and a description per line. `recipe copy NAME` writes the recipe, those that it extends and
the schema for editors, and prints the files that it wrote. It does not overwrite a recipe. `recipe paths CONFIG`
prints, for scripts, one path per line: the run folder and, if the recipe has no `corpus.test`, source and reference of
the validation text.
"""

import argparse
from pathlib import Path

from data_module.system.files import user_path
from pipeline.config.recipe import Recipe, add_recipe_arguments, load_recipe
from pipeline.config.recipe_files import copy_recipe, description, shipped_recipes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|copy|paths")
    actions.add_parser("list", help="print names and descriptions", allow_abbrev=False)
    copy = actions.add_parser("copy", help="copy a recipe", allow_abbrev=False)
    copy.add_argument("name", help="a name of `recipe list`")
    copy.add_argument("to", type=user_path, nargs="?", help="a .yaml file or a folder (default: this folder)")
    add_recipe_arguments(actions.add_parser("paths", help="print a recipe's paths", allow_abbrev=False))


def run(arguments: argparse.Namespace) -> int:
    """Print the recipes, the files written, or the paths."""
    if arguments.action == "copy":
        for path in copy_recipe(arguments.name, arguments.to):
            print(path)
        return 0
    if arguments.action == "paths":
        print(*recipe_paths(load_recipe(arguments.config, arguments.overrides)), sep="\n")
        return 0
    recipes = shipped_recipes()
    width = max(map(len, recipes))
    for name, path in recipes.items():
        print(f"{name:{width}}  {description(path)}")
    return 0


def recipe_paths(recipe: Recipe) -> list[Path]:
    """Return the run folder, and the validation text if the recipe has no test text, which `evaluate` finds itself."""
    folder = Path(recipe.corpus.folder)
    texts = [] if recipe.corpus.test else [folder / f"validation.{side}.txt" for side in ("source", "target")]
    return [recipe.run_folder(), *texts]
