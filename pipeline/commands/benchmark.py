"""Measure the speed and memory of training and of translating on this machine. The last output line is one JSON object.

In a clone of the project, `python -m tests.benchmark` compares with other programs, and measures learning and the data
path too.
"""

import argparse
import json
import os

from data_module.errors import InputError
from data_module.files import PlainValues, user_path
from pipeline.config.recipe import Recipe, add_recipe_arguments, load_recipe
from pipeline.inference.options import SearchOptions, add_search_arguments
from pipeline.inference.text_io import read_sentences

TRAIN = """Measure the speed and memory of training on the recipe's own batches.

One device trains the recipe as `fit` does, without checkpoints and validation. Figures:

  target_tokens_per_second  without padding, median of the rounds after the warm-up
  step_seconds              median, waiting for data included
  peak_memory_bytes         maximum size of the network's tensors: weights, moments, gradients, activations
  mfu                       model FLOPs utilization: flops_per_target_token x target_tokens_per_second /
                            ceiling_flops_per_second, which is measured on this machine, not taken from a data
                            sheet
  padding_share             share of padding in the rows
  flops_per_target_token    of the matrix products for tokens that are not padding, forward and backward, on average
                            over the corpus
  ceiling_flops_per_second  rate of large matrix products on this machine at the same precision, measured after each
                            round
"""
DECODE = """Measure how fast a checkpoint translates a text, the latency of single sentences, and memory.

Times include encoding and decoding of text; that of the whole text is the median of three rounds. OMP_NUM_THREADS sets
the number of threads.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a subcommand for each kind of benchmark."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="train|decode")
    add_train_arguments(_add_kind(kinds, "train", "training steps", TRAIN))
    add_decode_arguments(_add_kind(kinds, "decode", "translating a text", DECODE))


def _add_kind(
    kinds: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, purpose: str, description: str
) -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    return kinds.add_parser(name, help=purpose, description=description, allow_abbrev=False, formatter_class=raw)


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `train`."""
    add_recipe_arguments(parser)
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps to measure (default: %(default)s)")


def add_decode_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `decode`."""
    parser.add_argument("checkpoint", type=user_path, help="a .ckpt file or a run folder")
    parser.add_argument("--source", type=user_path, required=True, help="sentences to translate (plain or .gz)")
    add_search_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen kind of benchmark and print its figures."""
    if arguments.kind == "train":
        recipe = checked_recipe(arguments)
        quiet_profiler()
        from pipeline.benchmark import train  # imports PyTorch

        print_figures(train.measure(train.prepare(recipe), arguments.steps))
    else:
        sentences = checked_sentences(arguments)
        from pipeline.benchmark import decode  # imports PyTorch

        print_figures(decode.run(arguments.checkpoint, SearchOptions.given(arguments), sentences))
    return 0


def checked_recipe(arguments: argparse.Namespace) -> Recipe:
    """Return the recipe whose training is to be measured.

    Raises InputError for a mistake in the recipe, the overrides or the number of steps.
    """
    recipe = load_recipe(arguments.config, arguments.overrides)
    if arguments.steps < 1:
        raise InputError(f"--steps {arguments.steps}: must be 1 or more")
    if recipe.training.r_drop_alpha:
        raise InputError(
            f"training.r_drop_alpha {recipe.training.r_drop_alpha}: the benchmark has steps of one pass; give "
            "--training.r_drop_alpha 0; with R-Drop a step takes about twice as long"
        )
    return recipe


def quiet_profiler() -> None:
    """Silence PyTorch's profiler, which measures memory, on standard error; call this before PyTorch is imported."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def checked_sentences(arguments: argparse.Namespace) -> list[str]:
    """Return the sentences to translate, without empty lines.

    Raises InputError if there is none, or the file cannot be read.
    """
    sentences = [sentence for sentence in read_sentences(arguments.source) if sentence]
    if not sentences:
        raise InputError(f"{arguments.source}: has no sentences; give a text to translate")
    return sentences


def print_figures(figures: PlainValues) -> None:
    """Print figures as one line of JSON. Five significant digits are more than the clock's precision."""
    print(json.dumps(json.loads(json.dumps(figures), parse_float=lambda number: float(f"{float(number):.5g}"))))
