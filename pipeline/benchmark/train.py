"""Training's speed and memory on the recipe's own batches, and how they compare with other programs'.

One device trains the recipe as `fit` does, but for checkpoints and validation. Each baseline takes the same steps in
the same process, in turns with ours; a ratio is the median over turns of its time over ours. The figures:

  target_tokens_per_second  without padding, after warm-up: median, and its quartiles
  step_seconds              median, and those of its parts: data_wait (for the loader), forward, loss (from the
                            decoder's states on), backward, optimizer (norm and clipping too), rest (what lies
                            between: Lightning, the copy to the device). Our loss works out its own gradient in its
                            forward pass, so `loss` holds what in the baselines is part of `backward`.
  loop_seconds_per_step     Lightning, logging and data hand-over: a tiny network's step on one sentence in
                            Lightning's Trainer, less the same step in a bare loop; a turn is 50 steps, logged once
  peak_memory_bytes         what the network's tensors hold at most: weights, moments, gradients, activations
  padding_share             of all cells, both sides
  flops_per_target_token    of the matrix products that the real tokens need, forward and backward
  warm_up_steps             before the first that is timed; with a compiled network, 50 in a row that compiled nothing
  compiled_graphs           how many the network was compiled to
  steps_taken_again         steps of ours that were not timed, since they or their neighbours compiled a graph
  share_of_ceiling          the rate of those over this machine's rate of large products at the same precision,
                            which is measured between the turns
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

if TYPE_CHECKING:
    import torch
    from lightning.pytorch import Callback
    from torch import Tensor

    from data_module.tokenization.tokenizer import Tokenizer
    from data_module.translation_data_module import TranslationDataModule
    from model.translation_module import TranslationModule
    from pipeline.benchmark.side_by_side import SideBySide
    from pipeline.config.recipe import Recipe

LOOP_TURN, LOOP_STEPS = 50, 300


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("--config", type=Path, action="append", required=True, help="a recipe; again for each overlay")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps to measure (default: %(default)s)")
    parser.add_argument(
        "--baseline",
        action="append",
        default=[],
        choices=("torch", "marian"),
        help="compare with layers of torch.nn.Transformer, or with Hugging Face's MarianMTModel; may be repeated",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure and report."""
    from pipeline.runtime.console import quiet_lightning
    from pipeline.training.corpus import ensure_corpus

    # PyTorch's profiler, which counts memory, reports itself on standard error.
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
    place = benchmark_device(recipe.trainer)
    ensure_corpus(recipe.corpus)
    tokenizer = Tokenizer.load(Path(recipe.corpus.folder) / "tokenizer.model")
    contest = recipe_comparison(recipe, tokenizer, list(dict.fromkeys(arguments.baseline)), arguments.steps, place)
    figures = {
        "recipe": recipe.name,
        **figures_of(contest, recipe.network, tokenizer.vocabulary_size),
        "loop_seconds_per_step": loop_seconds(_loop_comparison(recipe, tokenizer, place)),
        "precision": str(place.options["precision"]),
        "device": torch.cuda.get_device_name() if place.device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "torch_version": torch.__version__,
    }
    print(table(figures), file=sys.stderr)
    print(json.dumps(rounded(figures)))
    return 0


class _Place(NamedTuple):
    """Where and how everything is trained."""

    options: dict[str, Any]
    """For Lightning's Trainer."""
    device: "torch.device"
    dtype: "torch.dtype"
    """What matrix products run in."""


def benchmark_device(trainer: dict[str, Any]) -> _Place:
    """One device, and what else of the recipe's `trainer:` has to do with its speed."""
    import torch

    from data_module.errors import InputError
    from pipeline.training.trainer import trainer_options

    kept: dict[str, Any] = {
        key: trainer[key] for key in trainer if key in ("accelerator", "precision", "deterministic")
    }
    options = trainer_options({**kept, "devices": 1})
    on_cpu = options["accelerator"] == "cpu"
    if not on_cpu and not torch.cuda.is_available():
        raise InputError(f"trainer.accelerator {options['accelerator']} is not here; use cpu")
    precision = str(options["precision"])
    if precision not in ("bf16-mixed", "32-true", "32"):
        raise InputError(f"trainer.precision {precision}: benchmark train knows bf16-mixed and 32-true only")
    dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float32
    return _Place(options, torch.device("cpu" if on_cpu else "cuda"), dtype)


def recipe_comparison(
    recipe: "Recipe", tokenizer: "Tokenizer", baselines: list[str], steps: int, place: _Place
) -> "SideBySide":
    """The recipe's network against the baselines."""
    from pipeline.benchmark.baselines import baseline_network, cross_entropy
    from pipeline.benchmark.side_by_side import BareLoop, SideBySide
    from pipeline.training.build import build_data, build_module

    module, data = build_module(recipe, tokenizer), build_data(recipe, tokenizer)
    loss = cross_entropy(tokenizer.pad_id, recipe.training.label_smoothing)
    others = {}
    for name in baselines:
        network = baseline_network(name, tokenizer.vocabulary_size, recipe.network, data.special, data.longest)
        others[name] = BareLoop(network, loss, recipe.training, recipe.network.d_model, place.device, place.dtype)
    # On a GPU a turn ends with a wait for it, so it has to be long beside that.
    contest = SideBySide(others, steps, 1 if place.device.type == "cpu" else 10, place.device, place.dtype)
    _fit(module, data, contest, place.options, [], False)
    return contest


def _loop_comparison(recipe: "Recipe", tokenizer: "Tokenizer", place: _Place) -> "SideBySide":
    """A tiny network on a few sentences, trained as `fit` does it and in a bare loop."""
    from model.loss import label_smoothed_loss
    from model.settings import NetworkSettings
    from model.transformer import Transformer
    from pipeline.benchmark.side_by_side import BareLoop, SideBySide
    from pipeline.monitoring.monitor import Monitor
    from pipeline.monitoring.run_log import RunLog
    from pipeline.training.build import build_data, build_module

    longest = build_data(recipe, tokenizer).longest
    network = NetworkSettings(num_layers=1, d_model=8, d_ff=8, num_heads=1, dropout=0.0)
    batches = replace(recipe.batches, batch_tokens=longest, group_tokens=None, max_tokens_per_device=None)
    # Not compiled, as the other is not: its network's time is not what is asked for.
    run = replace(recipe.run, compile=False)
    tiny = replace(recipe, network=network, batches=batches, run=run)
    module, data = build_module(tiny, tokenizer), build_data(tiny, tokenizer)
    bare = Transformer(tokenizer.vocabulary_size, network)

    def loss(states: "Tensor", targets: "Tensor") -> "Tensor":
        smoothing = recipe.training.label_smoothing
        return label_smoothed_loss(states, bare.embedding.weight, targets, smoothing, tokenizer.pad_id).smoothed

    others = {"bare": BareLoop(bare, loss, recipe.training, network.d_model, place.device, place.dtype)}
    contest = SideBySide(others, LOOP_STEPS, LOOP_TURN, place.device, place.dtype)
    # The Monitor's progress bar is part of the cost, but nothing to look at here.
    with tempfile.TemporaryDirectory() as folder, redirect_stderr(StringIO()):
        _fit(module, data, contest, place.options, [Monitor(LOOP_TURN)], RunLog(Path(folder), 0, writes=True))
    return contest


def _fit(
    module: "TranslationModule",
    data: "TranslationDataModule",
    contest: "SideBySide",
    options: dict[str, Any],
    callbacks: "list[Callback]",
    logger: Any,
) -> None:
    """Lightning's Trainer as `fit` has it, less validation and checkpoints."""
    from lightning.pytorch import Trainer

    trainer = Trainer(
        **options,
        # How many steps a compiled network needs before it is timed is not known: the contest ends it.
        max_steps=contest.num_steps if module.compiled_forward is None else -1,
        max_epochs=-1,
        check_val_every_n_epoch=None,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=logger,
        callbacks=[contest, *callbacks],
        profiler=contest.loader_profiler(),
    )
    trainer.fit(module, datamodule=data)
