"""Measure training as `python -m pipeline benchmark train` does, in turns with networks of other libraries.

Each baseline takes as many steps in the same process. Its batches have pairs of similar length and as many tokens,
padding included. `ratio_to_<baseline>` is the median over the rounds of our target tokens a second divided by the
baseline's, both without padding.
"""

import argparse

from data_module.files import PlainValues
from pipeline.benchmark.train import measure, prepare
from pipeline.commands.benchmark import add_train_arguments, checked_recipe
from tests.benchmark.baselines import Baseline


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_train_arguments(parser)
    parser.add_argument(
        "--baseline",
        action="append",
        default=[],
        choices=("torch", "marian"),
        help="compare with torch.nn.Transformer's layers or Hugging Face's MarianMTModel; may be repeated",
    )


def run(arguments: argparse.Namespace) -> PlainValues:
    training = prepare(checked_recipe(arguments))
    return measure(training, arguments.steps, {name: Baseline(name, training) for name in arguments.baseline})
