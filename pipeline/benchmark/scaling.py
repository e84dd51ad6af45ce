"""Predict step time and efficiency on 1, 2, 4 ... 512 GPUs, for one global batch and for one batch a GPU.

One GPU's step is measured as `benchmark train` does, on the recipe's batch and on a sixteenth of it. The smaller batch
gives the fixed part of a step, which does not depend on the batch size. With --gpu nothing is measured, and neither a
GPU nor the corpus is needed: the step is computed from its terms (see `step_terms`), compiled and in bf16-mixed. Its
fixed part is then the optimizer. The model:

  own work       fixed + (step - fixed) / n on n GPUs that share a batch; the whole step if each has its own batch.
                 With --gpu, at least the host's time to launch it
  all-reduce     2 (n-1)/n bytes / bandwidth + 2 (n-1) latency in a ring, 2 bytes / bandwidth + 2 log2(n) latency in
                 a tree; the shorter of the two
  overlap        DDP's buckets of 25 MiB become complete evenly through the backward pass of the last micro-batch and
                 are reduced one after another. The shared embedding's gradient is complete only at the end, so its
                 bucket is never hidden.
  efficiency     one GPU's step / (n x this step) for a shared batch, one GPU's step / this step otherwise

The model ignores ranks that wait for slower ones, memory and cores that the all-reduce takes from the backward pass,
and loading. Bandwidth is that of a ring (NCCL's "bus bandwidth") between nodes; the bandwidth inside a node may be
given as well.
"""

import argparse
import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.arguments import add_recipe_arguments

if TYPE_CHECKING:
    from pipeline.benchmark.scaling_model import Cluster, Prediction, Step
    from pipeline.config.recipe import Recipe

GPUS = [2**power for power in range(10)]
SMALLER = 16
"""Ratio of the two measured batch sizes."""
GRADIENT_BYTES = 4
"""Bytes of an element; gradients are float32 in mixed precision, too."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's arguments."""
    add_recipe_arguments(parser)
    parser.add_argument(
        "--bandwidth-gb-s",
        type=float,
        required=True,
        help="bandwidth between nodes, 10^9 bytes a second in each direction",
    )
    parser.add_argument(
        "--latency-us", type=float, required=True, help="latency from one GPU to the next, in microseconds"
    )
    parser.add_argument("--gpus-per-node", type=int, help="GPUs of a node; needs --node-bandwidth-gb-s")
    parser.add_argument("--node-bandwidth-gb-s", type=float, help="bandwidth inside a node (default: as between nodes)")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps to measure (default: %(default)s)")
    parser.add_argument(
        "--gpu", choices=("a100", "h100", "h200"), help="predict the step on this GPU, instead of measuring it"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure or predict the step of one GPU, predict that of more, and print."""
    from pipeline.benchmark.report import rounded
    from pipeline.benchmark.scaling_model import ddp_buckets, pays_up_to, strong_scaling, weak_scaling
    from pipeline.benchmark.step_terms import parameter_sizes
    from pipeline.config.recipe import load_recipe
    from pipeline.config.trainer_keys import trainer_signature
    from pipeline.runtime.console import quiet_lightning

    quiet_lightning()
    recipe = load_recipe(arguments.config, arguments.overrides, trainer_signature())
    cluster = _cluster(arguments)
    if arguments.gpu is None:
        step, vocabulary_size = _measured_step(recipe, arguments.steps)
        predicted: dict[str, Any] = {}
    else:
        vocabulary_size = recipe.corpus.vocabulary_size
        step, predicted = _predicted_step(recipe, arguments.gpu)
    gradients = [GRADIENT_BYTES * size for size in parameter_sizes(recipe.network, vocabulary_size)]
    buckets = ddp_buckets(gradients)
    strong = [strong_scaling(step, buckets, cluster, gpus) for gpus in GPUS]
    weak = [weak_scaling(step, buckets, cluster, gpus) for gpus in GPUS]
    figures = {
        "recipe": recipe.name,
        "measured": arguments.gpu is None,
        **predicted,
        "step_seconds": step.own_seconds(),
        "backward_seconds": step.backward_seconds,
        "fixed_seconds": step.fixed_seconds,
        "micro_batches": step.micro_batches,
        "batch_tokens": recipe.batches.batch_tokens,
        "gradient_bytes": sum(gradients),
        "bandwidth_gb_s": arguments.bandwidth_gb_s,
        "latency_us": arguments.latency_us,
        "gpus_per_node": arguments.gpus_per_node,
        "node_bandwidth_gb_s": arguments.node_bandwidth_gb_s,
        "strong_pays_up_to": pays_up_to(strong),
        "weak_pays_up_to": pays_up_to(weak),
        "strong": [prediction._asdict() for prediction in strong],
        "weak": [prediction._asdict() for prediction in weak],
    }
    print(_table(figures, strong, weak), file=sys.stderr)
    print(json.dumps(rounded(figures)))
    return 0


def _cluster(arguments: argparse.Namespace) -> "Cluster":
    """Return the links that the command line describes."""
    from data_module.errors import InputError
    from pipeline.benchmark.scaling_model import Cluster, Link

    per_node, inside = arguments.gpus_per_node, arguments.node_bandwidth_gb_s
    if (per_node is None) != (inside is None):
        raise InputError("--gpus-per-node and --node-bandwidth-gb-s belong together; give both or neither")
    for name in ("bandwidth_gb_s", "node_bandwidth_gb_s", "gpus_per_node"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < math.inf:
            raise InputError(f"{_option(name)} {value}: must be more than 0")
    if not 0 <= arguments.latency_us < math.inf:
        raise InputError(f"--latency-us {arguments.latency_us}: must be 0 or more")
    latency = arguments.latency_us / 1e6
    between = Link(arguments.bandwidth_gb_s * 1e9, latency)
    return Cluster(between) if inside is None else Cluster(between, Link(inside * 1e9, latency), per_node)


def _predicted_step(recipe: "Recipe", gpu: str) -> "tuple[Step, dict[str, Any]]":
    """Compute the step of one GPU from its terms; return it with the figures that only a prediction has."""
    from data_module.errors import InputError
    from pipeline.benchmark.step_terms import GPUS, Size, roofline

    precision = str(recipe.trainer.get("precision", "bf16-mixed"))
    if not precision.startswith(("bf16", "16")):
        raise InputError(f"trainer.precision {precision}: --gpu predicts 16-bit precision only; leave out one of both")
    size = Size(recipe.network, recipe.corpus.vocabulary_size, recipe.batches.batch_tokens)
    predicted = roofline(size, GPUS[gpu], recipe.run.kernels or "triton")
    step = predicted.step(_micro_batches(recipe))
    seconds = step.own_seconds()
    return step, {
        "gpu": predicted.gpu.name,
        "term_seconds": predicted.seconds(),
        "host_seconds": step.micro_batches * step.host_seconds,
        "target_tokens_per_second": size.tokens / seconds,
        "mfu_of_data_sheet_peak": predicted.mfu(seconds),
    }


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _measured_step(recipe: "Recipe", steps: int) -> "tuple[Step, int]":
    """Measure the step on the recipe's batch and on a smaller one; return it with the vocabulary size."""
    # PyTorch's profiler, which measures memory, writes to standard error.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from data_module.errors import InputError
    from data_module.tokenization.tokenizer import Tokenizer
    from pipeline.benchmark.report import figures_of
    from pipeline.benchmark.scaling_model import Step
    from pipeline.benchmark.train import benchmark_device, recipe_comparison
    from pipeline.training.build import build_data
    from pipeline.training.corpus import ensure_corpus

    if steps < 1:
        raise InputError(f"--steps {steps}: must be 1 or more")
    device = benchmark_device(recipe.trainer)
    ensure_corpus(recipe.corpus)
    tokenizer = Tokenizer.load(Path(recipe.corpus.folder) / "tokenizer.model")
    batch_tokens, longest = recipe.batches.batch_tokens, build_data(recipe, tokenizer, device.options).longest
    few = max(batch_tokens // SMALLER, longest)
    if 2 * few > batch_tokens:
        raise InputError(
            f"batches.batch_tokens {batch_tokens} leaves no room for a smaller batch beside the longest sentence, "
            f"{longest} tokens; raise it, or predict the step with --gpu"
        )
    smaller = replace(recipe.batches, batch_tokens=few, max_tokens_per_device=None)
    whole, part = (
        recipe_comparison(replace(recipe, batches=batches), tokenizer, [], steps, device)
        for batches in (recipe.batches, smaller)
    )
    figures, figures_of_part = (figures_of(one, recipe.network, tokenizer.vocabulary_size) for one in (whole, part))
    seconds, seconds_of_part = figures["step_seconds"], figures_of_part["step_seconds"]
    tokens, tokens_of_part = (
        sum(measured.tokens["ours"] for measured in one.rounds) / len(one.rounds) for one in (whole, part)
    )
    # The line through both measurements, at zero tokens. Timings scatter, so it may leave the possible range.
    fixed = seconds_of_part - tokens_of_part * (seconds - seconds_of_part) / (tokens - tokens_of_part)
    step = Step(seconds, figures["backward_seconds"], min(max(fixed, 0.0), seconds), _micro_batches(recipe))
    return step, tokenizer.vocabulary_size


def _micro_batches(recipe: "Recipe") -> int:
    """Return the number of micro-batches of the recipe's batch on one GPU."""
    batches = recipe.batches
    return math.ceil(batches.batch_tokens / (batches.max_tokens_per_device or batches.batch_tokens))


def _table(figures: dict[str, Any], strong: "list[Prediction]", weak: "list[Prediction]") -> str:
    """Return a table of both predictions, in milliseconds a step, and where more GPUs stop paying."""
    tokens = figures["batch_tokens"]
    shared, own = f"one batch of {tokens:,} tokens", f"{tokens:,} tokens a GPU"
    columns = f"{'ms/step':>10}{'exposed':>10}{'speed-up':>10}{'efficiency':>12}"
    lines = [f"{'':6}{shared:>42}{own:>42}", f"{'GPUs':6}{columns}{columns}"]
    for both in zip(strong, weak, strict=True):
        columns_of_row = (
            f"{1000 * one.step_seconds:10.1f}{1000 * one.exposed_seconds:10.1f}"
            f"{one.gpus * one.efficiency:10.1f}{one.efficiency:12.1%}"
            for one in both
        )
        lines.append(f"{both[0].gpus:<6}{''.join(columns_of_row)}")
    if "term_seconds" in figures:
        milliseconds = {**figures["term_seconds"], "launches": figures["host_seconds"]}
        terms = ", ".join(f"{name} {1000 * seconds:.1f}" for name, seconds in milliseconds.items())
        lines.append(f"{figures['gpu']}, ms: {terms}; MFU {figures['mfu_of_data_sheet_peak']:.0%} of the data sheet")
    for name, title in (("strong", shared), ("weak", own)):
        last = figures[f"{name}_pays_up_to"]
        beyond = f"on {2 * last}, efficiency is below one half" if last < GPUS[-1] else "more were not predicted"
        lines.append(f"{title}: more GPUs pay up to {last}; {beyond}")
    return "\n".join(lines)
