"""How fast, how lean, how full: a file a kind of `benchmark`. The last line is one JSON object."""

import argparse
import importlib

KINDS = {
    "train": "training steps, also against other programs",
    "scaling": "1 to 512 GPUs, predicted from one",
    "data": "preparing a corpus, planning its epochs, loading its batches",
    "decode": "translating a text, beside CTranslate2 and Hugging Face",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One kind of benchmark a file; it is imported when it is asked for."""
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
    """Run the kind that was asked for."""
    return int(importlib.import_module(f"pipeline.benchmark.{arguments.kind}").run(arguments))
