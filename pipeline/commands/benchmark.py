"""Measure speed, memory and learning. The last output line is one JSON object."""

import argparse
import importlib
import json
from typing import Any

from data_module.errors import InputError

KINDS = {
    "train": "training steps, also against other programs",
    "learn": "what a recipe learns by minute and by update, also beside another program",
    "roofline": "training on 1 to 512 GPUs, computed from data sheets",
    "data": "preparing a corpus, planning its epochs, loading its batches",
    "decode": "translating a text, also with CTranslate2 and Hugging Face",
}
REMOVED_KINDS = {"scaling": "'benchmark roofline' predicts the steps and measures nothing; see its --help"}
"""Kinds of earlier revisions, each with what serves instead."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a subcommand for each kind of benchmark, a module of `pipeline.benchmark`."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="|".join(KINDS))
    for kind, purpose in KINDS.items():
        module = importlib.import_module(f"pipeline.benchmark.{kind}")
        description = module.__doc__
        kind_parser = kinds.add_parser(
            kind,
            help=purpose,
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(kind_parser)
    for kind in REMOVED_KINDS:
        # With a recipe, whatever follows is parsed, so that `run` can refuse the kind.
        kinds.add_parser(kind).set_defaults(config=[])


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen kind of benchmark and print its figures."""
    if arguments.kind in REMOVED_KINDS:
        raise InputError(f"there is no 'benchmark {arguments.kind}': {REMOVED_KINDS[arguments.kind]}")
    figures = importlib.import_module(f"pipeline.benchmark.{arguments.kind}").run(arguments)
    print(json.dumps(_rounded(figures)))
    return 0


def _rounded(value: Any) -> Any:
    """Round to five significant digits, more than the clock's precision."""
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_rounded(inner) for inner in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
