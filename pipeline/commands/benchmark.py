"""Measure speed and memory. The last output line is one JSON object."""

import argparse
import importlib

KINDS = {
    "train": "training steps, also against other programs",
    "scaling": "training on 1 to 512 GPUs, predicted from one",
    "data": "preparing a corpus, planning its epochs, loading its batches",
    "decode": "translating a text, also with CTranslate2 and Hugging Face",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a subcommand for each kind of benchmark, a module of `pipeline.benchmark`."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="|".join(KINDS))
    for kind, purpose in KINDS.items():
        module = importlib.import_module(f"pipeline.benchmark.{kind}")
        description = module.__doc__
        one = kinds.add_parser(
            kind,
            help=purpose,
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(one)


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen kind of benchmark."""
    return int(importlib.import_module(f"pipeline.benchmark.{arguments.kind}").run(arguments))
