"""Measure the speed and memory of training on the recipe's own batches, in turns with networks of other libraries.

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

Each baseline takes as many steps in the same process, in turns of a few steps, so that a drift of the machine's speed
affects all alike. Its batches have pairs of similar length and as many tokens, padding included. `ratio_to_<baseline>`
is the median over these rounds of our target tokens per second divided by the baseline's, both without padding.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn
from torch.optim import Optimizer
from tqdm import tqdm

from data_module.batch import RankBatch
from data_module.errors import InputError
from data_module.system.files import PlainValues
from data_module.tokenization.tokenizer import TOKENIZER_NAME, Tokenizer
from model.training_module import TranslationModule
from pipeline.config.recipe import add_recipe_arguments, load_recipe
from pipeline.monitoring.performance import MatrixProduct, flops_per_target_token
from pipeline.runtime.backend_choice import choose_backend
from pipeline.runtime.console import quiet_lightning, say
from pipeline.runtime.devices import TrainerOptions, allow_tf32
from pipeline.training.build import build_data, build_module, refuse_optimizer
from pipeline.training.new_corpus import ensure_corpus
from pipeline.training.trainer import make_trainer, trainer_options
from tests.benchmark.baselines import ENDLESS, Baseline, PaddedStep, Precision

WARM_UP_STEPS = 5
"""Steps before the measurement. Compilation takes place in the first one."""
MEMORY_STEPS = 2
"""Steps that measure memory. They are not timed, because measuring memory slows them."""
MEMORY_ROUND = 1
OURS = "ours"
"""Name of the recipe's own network."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps to measure (default: %(default)s)")
    parser.add_argument(
        "--baseline",
        action="append",
        default=[],
        choices=("torch",),
        help="compare with torch.nn.Transformer's layers",
    )


def run(arguments: argparse.Namespace) -> PlainValues:
    recipe = load_recipe(arguments.config, arguments.overrides)
    if arguments.steps < 1:
        raise InputError(f"--steps {arguments.steps}: must be 1 or more")
    if recipe.training.r_drop_alpha:
        raise InputError(
            f"training.r_drop_alpha {recipe.training.r_drop_alpha}: the benchmark has steps of one pass; give "
            "--training.r_drop_alpha 0; with R-Drop a step takes about twice as long"
        )
    quiet_lightning()
    options, precision = one_device(recipe.trainer)
    ensure_corpus(recipe.corpus)
    tokenizer = Tokenizer.load(Path(recipe.corpus.folder) / TOKENIZER_NAME)
    backend = choose_backend(recipe.run.kernels, recipe.run.compile, options, recipe.network)
    for line in (*backend.notes, backend.line()):
        say(line)
    refuse_optimizer(recipe)
    module, data = build_module(recipe, tokenizer, backend), build_data(recipe, tokenizer, backend)
    size = module.network.vocabulary_size
    baselines = {name: Baseline(recipe, size, data, precision) for name in arguments.baseline}
    comparison = SideBySide(baselines, arguments.steps, precision)
    callback = LambdaCallback(on_train_start=comparison.start, on_train_batch_end=comparison.after_step)
    own = {"logger": False, "callbacks": [callback], "max_steps": ENDLESS, "limit_val_batches": 0}
    make_trainer(options, None, (), **own).fit(module, datamodule=data)
    figures = {
        "recipe": recipe.name,
        **figures_of(comparison, flops_per_target_token(recipe.network, size, data.train_corpus)),
        "precision": str(options["precision"]),
        "device": torch.cuda.get_device_name() if precision[0].type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "torch_version": torch.__version__,
    }
    print(table(figures), file=sys.stderr)
    return figures


def one_device(trainer: TrainerOptions) -> tuple[TrainerOptions, Precision]:
    """Return the Trainer's options for one device, and the device and precision that all networks train with.

    Of the recipe's `trainer:`, only options that affect speed are kept.

    Raises InputError if the device or the precision is not available here.
    """
    names = ("accelerator", "precision", "deterministic")
    kept = {key: trainer[key] for key in names if key in trainer}
    options = trainer_options({**kept, "devices": 1})
    allow_tf32(options)
    on_cpu = options["accelerator"] == "cpu"
    if not on_cpu and not torch.cuda.is_available():
        raise InputError(f"trainer.accelerator {options['accelerator']} is not available on this machine; use cpu")
    precision = str(options["precision"])
    if precision not in ("bf16-mixed", "32-true", "32"):
        raise InputError(f"trainer.precision {precision}: is not supported here; use bf16-mixed or 32-true")
    dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float32
    return options, (torch.device("cpu" if on_cpu else "cuda"), dtype)


class SideBySide:
    """Measures `fit`'s training steps, lets the baselines take as many after each round, and ends training.

    The first round is the warm-up, the second one measures memory, all others measure time.
    """

    def __init__(self, baselines: Mapping[str, Baseline], steps: int, precision: Precision) -> None:
        """Measure `steps` steps of each network, rounded up to whole rounds."""
        self.step_seconds: dict[str, list[float]] = {name: [] for name in (OURS, *baselines)}
        """Seconds of a step in each timed round, by network."""
        self.token_rates: dict[str, list[float]] = {name: [] for name in (OURS, *baselines)}
        """Target tokens per second, without padding, in each timed round, by network."""
        self.product_rates: list[float] = []
        """FLOP/s of a large matrix product, measured right after each timed round."""
        self.peak_memory: dict[str, int] = {}
        """Bytes, by network."""
        self.num_tokens = self.num_row_tokens = 0
        """Our tokens of both sides in timed rounds: without padding, and with it."""
        self._baselines, self._device, self._product = baselines, precision[0], MatrixProduct(*precision)
        # On a GPU, a round ends by waiting for the device; longer rounds make that negligible.
        round_steps = 1 if self._device.type == "cpu" else 10
        sizes = [WARM_UP_STEPS, MEMORY_STEPS, *[round_steps] * -(-steps // round_steps)]
        self._rounds = enumerate(tqdm(sizes, desc="measuring", unit="round", leave=False))
        self._round, self._round_steps = next(self._rounds)
        self._batches: list[RankBatch] = []

    def start(self, *_: object) -> None:
        """Start to measure a network's part of the round."""
        if self._round == MEMORY_ROUND:
            self._memory = PeakMemory(self._device)
        self._started = self._now()

    def after_step(
        self, trainer: Trainer, module: TranslationModule, _outputs: object, batch: RankBatch, _index: int
    ) -> None:
        """Count our step; at the end of a round, let the baselines take theirs."""
        self._batches.append(batch)
        if len(self._batches) < self._round_steps:
            return
        self._finish(OURS, self._batches, module.network, trainer.optimizers[0])
        for name, baseline in self._baselines.items():
            steps = [baseline.next_step() for _ in self._batches]
            self.start()
            for step in steps:
                baseline.train(step)
            self._finish(name, steps, baseline.network, baseline.optimizer)
        if self._round > MEMORY_ROUND:
            self.product_rates.append(self._product.rate())
            self.num_tokens += sum(batch.num_tokens for batch in self._batches)
            self.num_row_tokens += sum(batch.num_row_tokens for batch in self._batches)
        self._batches = []
        self._round, self._round_steps = next(self._rounds, (self._round, 0))
        trainer.should_stop = self._round_steps == 0
        self.start()

    def _finish(
        self, name: str, steps: Sequence[RankBatch | PaddedStep], network: nn.Module, optimizer: Optimizer
    ) -> None:
        """Record the part of the round that a network has completed."""
        seconds = self._now() - self._started
        if self._round == MEMORY_ROUND:
            self.peak_memory[name] = self._memory.read() + kept_bytes(network, optimizer)
        elif self._round > MEMORY_ROUND:
            self.step_seconds[name].append(seconds / len(steps))
            self.token_rates[name].append(sum(step.num_target_tokens for step in steps) / seconds)

    def _now(self) -> float:
        """Return the time in seconds after waiting for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


class PeakMemory:
    """Peak of the memory that tensors hold, beyond what they held when this object was created.

    The size of the process is no measure: several networks share it, and its allocator keeps freed memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._profile = None if device.type == "cuda" else torch.autograd.profiler.profile(profile_memory=True)
        if self._profile is None:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        else:
            self._profile.__enter__()

    def read(self) -> int:
        """Stop measuring and return the peak in bytes."""
        if self._profile is None:
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() - self._before
        self._profile.__exit__(None, None, None)
        results = self._profile.kineto_results
        assert results is not None
        allocations, events = [], list(results.experimental_event_tree())
        while events:
            event = events.pop()
            if hasattr(event.extra_fields, "alloc_size"):
                allocations.append((event.start_time_ns, event.extra_fields.alloc_size))
            events += event.children
        held = peak = 0
        for _, size in sorted(allocations):
            held += size
            peak = max(peak, held)
        return peak


def kept_bytes(network: nn.Module, optimizer: Optimizer) -> int:
    """Return the bytes that are kept between steps: weights, buffers and the optimizer's moments."""
    moments = [value for state in optimizer.state.values() for value in state.values() if hasattr(value, "nbytes")]
    return sum(tensor.nbytes for tensor in (*network.parameters(), *network.buffers(), *moments))


def figures_of(comparison: SideBySide, flops: float) -> PlainValues:
    """Return our figures, the ratios and, under `baselines`, each other's figures, in seconds, bytes and FLOP/s.

    `flops` are those of the network per target token.
    """
    product_rate = median(comparison.product_rates)

    def of_network(name: str) -> PlainValues:
        return {
            "target_tokens_per_second": median(comparison.token_rates[name]),
            "step_seconds": median(comparison.step_seconds[name]),
            "peak_memory_bytes": comparison.peak_memory[name],
            "mfu": median(comparison.token_rates[name]) * flops / product_rate,
        }

    ours, *baselines = comparison.token_rates
    figures = {
        **of_network(ours),
        "padding_share": 1.0 - comparison.num_tokens / comparison.num_row_tokens,
        "flops_per_target_token": flops,
        "ceiling_flops_per_second": product_rate,
        "baselines": {name: of_network(name) for name in baselines},
    }
    for name in baselines:
        rates = zip(comparison.token_rates[ours], comparison.token_rates[name], strict=True)
        figures[f"ratio_to_{name}"] = median(mine / theirs for mine, theirs in rates)
    return figures


def table(figures: PlainValues) -> str:
    """Return a table with a line for each network, and a line about ours."""
    lines = [f"{'':8}{'tokens/s':>10}{'ms/step':>10}{'MB':>8}{'ratio':>7}"]
    for name, of_network in {OURS: figures, **figures["baselines"]}.items():
        ratio = f"{figures[f'ratio_to_{name}']:7.2f}" if name != OURS else ""
        lines.append(
            f"{name:8}{of_network['target_tokens_per_second']:10,.0f}{1000 * of_network['step_seconds']:10.1f}"
            f"{of_network['peak_memory_bytes'] / 1e6:8,.0f}{ratio}"
        )
    lines.append(
        f"MFU {figures['mfu']:.1%} of {figures['ceiling_flops_per_second'] / 1e9:,.0f} GFLOP/s "
        f"({figures['precision']}, {figures['threads']} threads), {figures['padding_share']:.1%} padding, "
        f"{figures['flops_per_target_token'] / 1e6:.1f} MFLOP a target token"
    )
    return "\n".join(lines)
