"""Measure the speed and memory of training on the recipe's own batches, also against other programs.

One device trains the recipe as `fit` does, without checkpoints and validation. Each baseline takes as many steps in the
same process, in turns with ours, a few steps at a time. Its batches have pairs of similar length and as many tokens,
padding included. A ratio is the median over these rounds of our target tokens a second divided by the baseline's, both
without padding. No step is timed in which something is compiled. Figures:

  target_tokens_per_second  without padding, after the warm-up: median and quartiles
  step_seconds              median and quartiles, waiting for data included
  peak_memory_bytes         maximum size of the network's tensors: weights, moments, gradients, activations
  mfu                       model FLOPs utilization: flops_per_target_token x target_tokens_per_second /
                            ceiling_flops_per_second. The peak is measured on this machine, not taken from a data
                            sheet.
  padding_share             share of padding in our rows
  flops_per_target_token    of the matrix products for tokens that are not padding, forward and backward
  ceiling_flops_per_second  rate of large matrix products on this machine at the same precision, measured after each
                            round
"""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.recipe import add_recipe_arguments

if TYPE_CHECKING:
    from data_module.tokenization.tokenizer import Tokenizer
    from pipeline.benchmark.baselines import Precision
    from pipeline.benchmark.side_by_side import SideBySide
    from pipeline.config.recipe import Recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's arguments."""
    add_recipe_arguments(parser)
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps to measure (default: %(default)s)")
    parser.add_argument(
        "--baseline",
        action="append",
        default=[],
        choices=("torch", "marian"),
        help="compare with torch.nn.Transformer's layers or Hugging Face's MarianMTModel; may be repeated",
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure, print a table and return the figures."""
    from pipeline.runtime.console import quiet_lightning
    from pipeline.training.fit import ensure_corpus

    # PyTorch's profiler, which measures memory, writes to standard error.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    quiet_lightning()
    import torch

    from data_module.errors import InputError
    from data_module.tokenization.tokenizer import Tokenizer
    from pipeline.benchmark.side_by_side import figures_of, table
    from pipeline.config.recipe import load_recipe
    from pipeline.config.settings import trainer_signature

    recipe = load_recipe(arguments.config, arguments.overrides, trainer_signature())
    if arguments.steps < 1:
        raise InputError(f"--steps {arguments.steps}: must be 1 or more")
    options, precision = benchmark_device(recipe.trainer)
    ensure_corpus(recipe.corpus)
    tokenizer = Tokenizer.load(Path(recipe.corpus.folder) / "tokenizer.model")
    baselines = list(dict.fromkeys(arguments.baseline))
    comparison = recipe_comparison(recipe, tokenizer, baselines, arguments.steps, options, precision)
    figures = {
        "recipe": recipe.name,
        **figures_of(comparison, recipe.network, tokenizer.vocabulary_size),
        "precision": str(options["precision"]),
        "device": torch.cuda.get_device_name() if precision[0].type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "torch_version": torch.__version__,
    }
    print(table(figures), file=sys.stderr)
    return figures


def benchmark_device(trainer: dict[str, Any]) -> "tuple[dict[str, Any], Precision]":
    """Return the Trainer's options for one device, and the device and precision that all networks train with.

    Of the recipe's `trainer:`, only options that affect speed are kept.

    Raises:
        InputError: the device or the precision is not available here.
    """
    import torch

    from data_module.errors import InputError
    from pipeline.training.trainer import trainer_options

    kept: dict[str, Any] = {
        key: trainer[key] for key in ("accelerator", "precision", "deterministic") if key in trainer
    }
    options = trainer_options({**kept, "devices": 1})
    on_cpu = options["accelerator"] == "cpu"
    if not on_cpu and not torch.cuda.is_available():
        raise InputError(f"trainer.accelerator {options['accelerator']} is not available on this machine; use cpu")
    precision = str(options["precision"])
    if precision not in ("bf16-mixed", "32-true", "32"):
        raise InputError(f"trainer.precision {precision}: is not supported here; use bf16-mixed or 32-true")
    dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float32
    return options, (torch.device("cpu" if on_cpu else "cuda"), dtype)


def recipe_comparison(
    recipe: "Recipe",
    tokenizer: "Tokenizer",
    baselines: list[str],
    steps: int,
    options: dict[str, Any],
    precision: "Precision",
) -> "SideBySide":
    """Train the recipe's network and, in turns with it, the baselines."""
    from data_module.errors import InputError
    from pipeline.benchmark.baselines import ENDLESS, Baseline
    from pipeline.benchmark.side_by_side import SideBySide
    from pipeline.runtime.backend import choose_backend
    from pipeline.runtime.console import say
    from pipeline.training.build import build_data, build_module, refuse_optimizer
    from pipeline.training.trainer import make_trainer

    if recipe.training.r_drop_alpha:
        raise InputError(
            f"training.r_drop_alpha {recipe.training.r_drop_alpha}: the benchmark has steps of one pass; give "
            "--training.r_drop_alpha 0; with R-Drop a step takes about twice as long"
        )
    run = recipe.run
    backend = choose_backend(run.kernels, run.compile, options, recipe.network, run.cuda_graphs)
    for line in (*backend.notes, backend.line()):
        say(line)
    refuse_optimizer(recipe)
    module = build_module(recipe, tokenizer, backend)
    data = build_data(recipe, tokenizer, backend)
    others = {name: Baseline(name, recipe, tokenizer.vocabulary_size, data, precision) for name in baselines}
    # On a GPU, a round ends by waiting for the device; longer rounds make that negligible.
    round_steps = 1 if precision[0].type == "cpu" else 10
    comparison = SideBySide(others, steps, round_steps, precision, data.epochs())
    trainer = make_trainer(options, None, logger=False, callbacks=[comparison], max_steps=ENDLESS, limit_val_batches=0)
    trainer.fit(module, datamodule=data)
    return comparison
