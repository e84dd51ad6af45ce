"""List the recipes that come with the program, or copy one to change it.

`recipe list` prints a name and a description a line. `recipe copy NAME` writes the recipe, those that it extends and
the schema for editors, and prints the files that it wrote. It does not overwrite a recipe.
"""

import argparse

from data_module.files import user_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `list` and `copy`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|copy")
    actions.add_parser("list", help="print names and descriptions", allow_abbrev=False)
    copy = actions.add_parser("copy", help="copy a recipe", allow_abbrev=False)
    copy.add_argument("name", help="a name of `recipe list`")
    copy.add_argument("to", type=user_path, nargs="?", help="a file or a folder (default: NAME.yaml in this folder)")


def run(arguments: argparse.Namespace) -> int:
    """Print the recipes or the files written."""
    from pipeline.config.shipped import copy_recipe, description, shipped_recipes

    if arguments.action == "copy":
        for path in copy_recipe(arguments.name, arguments.to):
            print(path)
        return 0
    recipes = shipped_recipes()
    width = max(map(len, recipes))
    for name, path in recipes.items():
        print(f"{name:{width}}  {description(path)}")
    return 0
