"""Measure speed, memory and learning. The last output line is one JSON object."""

import argparse
import importlib
import json

from data_module.errors import InputError

KINDS = {
    "train": "training steps, also against other programs",
    "learn": "what a recipe learns by minute and by update, also beside another program",
    "data": "preparing a corpus, planning its epochs, loading its batches",
    "decode": "translating a text, also with CTranslate2",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a subcommand for each kind of benchmark, a module of `pipeline.benchmark`."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="|".join(KINDS))
    for kind, purpose in KINDS.items():
        module = importlib.import_module(f"pipeline.benchmark.{kind}")
        kind_parser = kinds.add_parser(
            kind,
            help=purpose,
            description=module.__doc__,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(kind_parser)
    # With a recipe, whatever follows is parsed, so that `run` can refuse the kind.
    kinds.add_parser("roofline", add_help=False).set_defaults(config=[])


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen kind of benchmark and print its figures."""
    if arguments.kind == "roofline":
        raise InputError("'benchmark roofline' has gone; docs/roofline.md in a clone of the project has its figures")
    figures = importlib.import_module(f"pipeline.benchmark.{arguments.kind}").run(arguments)
    # Five significant digits are more than the clock's precision.
    print(json.dumps(json.loads(json.dumps(figures), parse_float=lambda number: float(f"{float(number):.5g}"))))
    return 0
