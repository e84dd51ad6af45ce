"""Measures training, decoding and the data path on this machine, in turns with other programs where asked to.

`python -m tests.benchmark <kind> --help` explains the figures. The last output line is one JSON object.
"""

import argparse
import importlib
import json
import os
import sys

from data_module.errors import InputError
from pipeline.__main__ import OneLineParser
from pipeline.runtime.console import report

KINDS = ("train", "decode", "data")


def parse(words: list[str]) -> argparse.Namespace:
    """Return the parsed arguments. What follows a recipe and is unknown are its overrides.

    Raises InputError for arguments that the benchmark does not take.
    """
    parser = OneLineParser(prog="python -m tests.benchmark", description=__doc__, allow_abbrev=False)
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind in KINDS:
        module = importlib.import_module(f"tests.benchmark.{kind}")
        raw = argparse.RawDescriptionHelpFormatter
        kind_parser = kinds.add_parser(kind, description=module.__doc__, formatter_class=raw, allow_abbrev=False)
        module.add_arguments(kind_parser)
        kind_parser.set_defaults(run=module.run)
    arguments, arguments.overrides = parser.parse_known_args(words)
    if arguments.overrides and not hasattr(arguments, "config"):
        parser.error(f"argument '{arguments.overrides[0]}' is unknown")
    return arguments


def main(words: list[str]) -> int:
    # PyTorch's profiler, which measures memory, is silent if these are set before PyTorch is imported.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        arguments = parse(words)
        # Five significant digits are more than the clock's precision.
        figures = json.dumps(arguments.run(arguments))
        print(json.dumps(json.loads(figures, parse_float=lambda number: float(f"{float(number):.5g}"))))
    except InputError as error:
        report(f"error: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
