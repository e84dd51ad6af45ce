"""Use text of one language to train a better model: write recipes and a plan of commands, then run each command once.

`synthesize back-translation` translates text of the target language back, and trains on real and synthetic pairs.
`synthesize distillation` trains a small network on the translations of a larger one. The folder holds the recipes,
`plan.txt` with the commands, and all that they write. The same command, run again, continues where it was stopped.
Settings of the recipe may be given as --section.key value.
"""

import argparse
from pathlib import Path

from data_module.errors import InputError
from data_module.system.files import user_path
from pipeline.commands.score import require_share
from pipeline.config.recipe import add_recipe_arguments, load_recipe
from pipeline.config.settings import validate_trainer_keys
from pipeline.inference.file_options import check_files
from pipeline.inference.options import SearchOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the two kinds of synthetic text, with the options of each."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="back-translation|distillation")
    back = kinds.add_parser("back-translation", help="text of the target language as training text", allow_abbrev=False)
    _add_common(back, "sentences of the target language (plain or .gz)", is_required=True)
    back.add_argument(
        "--reverse-model",
        dest="model",
        type=user_path,
        metavar="CHECKPOINT",
        help="what translates the text in the first round (default: a model of the recipe with both sides exchanged)",
    )
    back.add_argument(
        "--keep", type=float, default=0.9, metavar="SHARE", help="train on the best share of the pairs (default: 0.9)"
    )
    back.add_argument("--rounds", type=int, default=1, metavar="N", help="repeat with the better models")
    distil = kinds.add_parser("distillation", help="a teacher's translations as training text", allow_abbrev=False)
    _add_common(distil, "further sentences of the source language (plain or .gz)", is_required=False)
    distil.add_argument(
        "--teacher", dest="model", type=user_path, required=True, metavar="CHECKPOINT", help="what translates the text"
    )
    distil.set_defaults(keep=1.0, rounds=1)


def _add_common(parser: argparse.ArgumentParser, text: str, is_required: bool) -> None:
    add_recipe_arguments(parser)
    parser.add_argument("--text", type=user_path, required=is_required, metavar="FILE", help=text)
    parser.add_argument("--beam", type=int, help="translate by a search with this beam (back-translation: samples)")
    parser.add_argument("--folder", type=user_path, help="folder to write (default: RUN-back-translation or the like)")
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--plan", action="store_true", help="write the recipes and plan.txt, print the stages, and stop")
    part.add_argument("--stage", metavar="NAME", help="run this stage alone, as slurm/synthesize.sh does")


def run(arguments: argparse.Namespace) -> int:
    """Check the arguments, make the plan and follow it; return the exit code of the last stage that ran."""
    SearchOptions(beam_size=arguments.beam)
    require_share(arguments.keep)
    if arguments.rounds < 1:
        raise InputError(f"--rounds {arguments.rounds}: must be 1 or more")
    recipe = load_recipe(arguments.config, arguments.overrides)
    with recipe.naming_places():
        validate_trainer_keys(recipe.trainer)
        folder = arguments.folder = arguments.folder or Path(f"{recipe.run_folder()}-{arguments.kind}")
        check_files(arguments, [recipe.as_dict()])
        from pipeline.commands.synthesis import make_plan  # torch

        plan = make_plan(arguments, recipe, folder)
    if arguments.plan:
        plan.print_stages()
        return 0
    return plan.run(arguments.stage)
