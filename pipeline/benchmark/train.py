"""Measure the speed and memory of training on the recipe's own batches, also against other programs.

One device trains the recipe as `fit` does, without checkpoints and validation. Each baseline takes as many steps in the
same process, alternating with ours in rounds of a few steps. Its batches have pairs of similar length and as many
tokens, padding included. A ratio is the median over rounds of our target tokens a second divided by the baseline's,
both without padding. Figures:

  target_tokens_per_second  without padding, after the warm-up: median and quartiles
  step_seconds              median and quartiles; medians of its phases: data_wait (for the loader), forward, loss
                            (from the decoder's states on), backward, optimizer (with norm and clipping), rest
                            (Lightning and the copy to the device). Our loss computes its own gradient in its forward
                            pass; the baselines compute that part in `backward`.
  loop_seconds_per_step     cost of Lightning, logging and data hand-over: a tiny network's step on one sentence in
                            Lightning's Trainer, minus the same step in a bare loop; logged once in 50 steps
  peak_memory_bytes         maximum size of the network's tensors: weights, moments, gradients, activations
  parameters                trainable parameters
  padding_share             share of dead tokens in the rows of both sides
  flops_per_target_token    of the matrix products for tokens that are not padding, forward and backward
  ceiling_flops_per_second  rate of large matrix products on this machine at the same precision, measured after each
                            round
  mfu                       model FLOPs utilization: flops_per_target_token x target_tokens_per_second /
                            ceiling_flops_per_second. The peak is measured on this machine, not taken from a data
                            sheet.
  warm_up_steps             steps before the first timed step; a compiled network warms up until 50 consecutive steps
                            compiled nothing
  compiled_graphs           number of graphs that the network was compiled to
  steps_taken_again         steps of ours that were repeated because a graph was compiled in their round
"""

import argparse
import json
import os
import sys
import tempfile
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.config.arguments import add_recipe_arguments

if TYPE_CHECKING:
    import torch
    from lightning.pytorch import Callback
    from torch import Tensor

    from data_module.tokenization.tokenizer import Tokenizer
    from data_module.translation_data_module import TranslationDataModule
    from model.translation_module import TranslationModule
    from pipeline.benchmark.side_by_side import SideBySide
    from pipeline.config.recipe import Recipe

LOOP_ROUND, LOOP_STEPS = 50, 300
ENDLESS = 1 << 40
"""`max_steps` of training that the comparison ends."""


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


def run(arguments: argparse.Namespace) -> int:
    """Measure and print."""
    from pipeline.runtime.console import quiet_lightning
    from pipeline.training.corpus import ensure_corpus

    # PyTorch's profiler, which measures memory, writes to standard error.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    quiet_lightning()
    import torch

    from data_module.errors import InputError
    from data_module.tokenization.tokenizer import Tokenizer
    from pipeline.benchmark.report import figures_of, loop_seconds, rounded, table
    from pipeline.config.recipe import load_recipe
    from pipeline.config.trainer_keys import trainer_signature

    recipe = load_recipe(arguments.config, arguments.overrides, trainer_signature())
    if arguments.steps < 1:
        raise InputError(f"--steps {arguments.steps}: must be 1 or more")
    device = benchmark_device(recipe.trainer)
    ensure_corpus(recipe.corpus)
    tokenizer = Tokenizer.load(Path(recipe.corpus.folder) / "tokenizer.model")
    baselines = list(dict.fromkeys(arguments.baseline))
    comparison = recipe_comparison(recipe, tokenizer, baselines, arguments.steps, device)
    figures = {
        "recipe": recipe.name,
        **figures_of(comparison, recipe.network, tokenizer.vocabulary_size),
        "loop_seconds_per_step": loop_seconds(_loop_comparison(recipe, tokenizer, device)),
        "precision": str(device.options["precision"]),
        "device": torch.cuda.get_device_name() if device.device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "torch_version": torch.__version__,
    }
    print(table(figures), file=sys.stderr)
    print(json.dumps(rounded(figures)))
    return 0


class BenchmarkDevice(NamedTuple):
    """The device and precision that all networks train with."""

    options: dict[str, Any]
    """Arguments of Lightning's Trainer."""
    device: "torch.device"
    dtype: "torch.dtype"
    """Type of matrix products."""

    @property
    def precision(self) -> "tuple[torch.device, torch.dtype]":
        """Device and type."""
        return self.device, self.dtype


def benchmark_device(trainer: dict[str, Any]) -> BenchmarkDevice:
    """Return one device with the options of the recipe's `trainer:` that affect speed."""
    import torch

    from data_module.errors import InputError
    from pipeline.training.trainer import trainer_options

    kept: dict[str, Any] = {
        key: trainer[key] for key in trainer if key in ("accelerator", "precision", "deterministic")
    }
    options = trainer_options({**kept, "devices": 1})
    on_cpu = options["accelerator"] == "cpu"
    if not on_cpu and not torch.cuda.is_available():
        raise InputError(f"trainer.accelerator {options['accelerator']} is not available on this machine; use cpu")
    precision = str(options["precision"])
    if precision not in ("bf16-mixed", "32-true", "32"):
        raise InputError(f"trainer.precision {precision}: is not supported here; use bf16-mixed or 32-true")
    dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float32
    return BenchmarkDevice(options, torch.device("cpu" if on_cpu else "cuda"), dtype)


def recipe_comparison(
    recipe: "Recipe", tokenizer: "Tokenizer", baselines: list[str], steps: int, device: BenchmarkDevice
) -> "SideBySide":
    """Train the recipe's network and the baselines."""
    from data_module.corpus.store import lengths_with_eos
    from data_module.errors import InputError
    from model.lr_schedule import build_schedule
    from pipeline.benchmark.baselines import baseline_network, cross_entropy, padded_steps
    from pipeline.benchmark.side_by_side import BareLoop, SideBySide
    from pipeline.training.build import build_data, build_module
    from pipeline.training.kernels import choose_kernels, choose_loss

    if recipe.training.r_drop_alpha:
        raise InputError(
            f"training.r_drop_alpha {recipe.training.r_drop_alpha}: the benchmark has steps of one pass; give "
            "--training.r_drop_alpha 0; with R-Drop a step takes about twice as long"
        )
    kernels = choose_kernels(recipe.run.kernels, device.options, recipe.network)
    compiled_loss = choose_loss(recipe.run.kernels, device.options)
    module = build_module(recipe, tokenizer, kernels=kernels, compiled_loss=compiled_loss)
    data = build_data(recipe, tokenizer, device.options, kernels)
    lengths = lengths_with_eos(data.train_corpus.source), lengths_with_eos(data.train_corpus.target)
    loss = cross_entropy(tokenizer.pad_id, recipe.training.label_smoothing)
    schedule = build_schedule(recipe.training, recipe.network.d_model, ENDLESS)
    others = {}
    for name in baselines:
        network = baseline_network(name, tokenizer.vocabulary_size, recipe.network, data.special, data.longest)
        batches = padded_steps(data, device.device)
        others[name] = BareLoop(network, loss, recipe.training, schedule, device.precision, batches)
    # On a GPU, a round ends by waiting for the device; longer rounds make that negligible.
    round_steps = 1 if device.device.type == "cpu" else 10
    comparison = SideBySide(others, steps, round_steps, device.precision, lengths)
    # The warm-up of a compiled network has no known length; the comparison ends training.
    max_steps = comparison.num_steps if module.compiled_forward is None else ENDLESS
    _fit(module, data, [comparison], device.options, max_steps, profiler=comparison.loader_profiler())
    return comparison


def _loop_comparison(recipe: "Recipe", tokenizer: "Tokenizer", device: BenchmarkDevice) -> "SideBySide":
    """Train a tiny network on single sentences, as `fit` does and in a bare loop."""
    from data_module.corpus.store import lengths_with_eos
    from model.loss import label_smoothed_loss
    from model.lr_schedule import build_schedule
    from model.settings import NetworkSettings
    from pipeline.benchmark.side_by_side import BareLoop, SideBySide
    from pipeline.monitoring.run_log import RunLog
    from pipeline.monitoring.training_monitor import TrainingMonitor
    from pipeline.training.build import build_data, build_module

    longest = build_data(recipe, tokenizer, device.options).longest
    network = NetworkSettings(num_layers=1, d_model=8, d_ff=8, num_heads=1, dropout=0.0)
    batches = replace(recipe.batches, batch_tokens=longest, max_tokens_per_device=None)
    # Not compiled, like the bare loop's network, whose time is to be subtracted.
    run = replace(recipe.run, compile=False)
    tiny = replace(recipe, network=network, batches=batches, run=run)
    module, data = build_module(tiny, tokenizer), build_data(tiny, tokenizer, device.options)
    lengths = lengths_with_eos(data.train_corpus.source), lengths_with_eos(data.train_corpus.target)
    bare = build_module(tiny, tokenizer)

    def loss(states: "Tensor", targets: "Tensor") -> "Tensor":
        smoothing = recipe.training.label_smoothing
        return label_smoothed_loss(*bare.network.as_product(states), targets, smoothing, tokenizer.pad_id).smoothed

    schedule = build_schedule(recipe.training, network.d_model, LOOP_STEPS)
    forward = lambda _, batch: bare.states(batch)  # noqa: E731
    loop = BareLoop(bare.network, loss, recipe.training, schedule, device.precision, forward=forward)
    comparison = SideBySide({"bare": loop}, LOOP_STEPS, LOOP_ROUND, device.precision, lengths)
    # The progress bar is part of the cost but is not shown.
    with tempfile.TemporaryDirectory() as folder, redirect_stderr(StringIO()):
        log = RunLog(Path(folder), 0, writes=True)
        callbacks = [comparison, TrainingMonitor(LOOP_ROUND)]
        _fit(module, data, callbacks, device.options, comparison.num_steps, log, comparison.loader_profiler())
    return comparison


def _fit(
    module: "TranslationModule",
    data: "TranslationDataModule",
    callbacks: "list[Callback]",
    options: dict[str, Any],
    max_steps: int,
    logger: Any = False,
    profiler: Any = None,
) -> None:
    """Train with Lightning's Trainer as `fit` does, without validation and checkpoints."""
    from lightning.pytorch import Trainer

    trainer = Trainer(
        **options,
        max_steps=max_steps,
        max_epochs=-1,
        check_val_every_n_epoch=None,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=logger,
        callbacks=callbacks,
        profiler=profiler,
    )
    trainer.fit(module, datamodule=data)
