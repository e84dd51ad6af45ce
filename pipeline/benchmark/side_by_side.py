"""Train the recipe as `fit` does and, in turns with it, other networks.

Taking turns exposes all networks to the same changes in the machine's speed. Time and memory are measured in the same
way for every network, and without slowing it.
"""

import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from numpy.typing import NDArray
from torch import nn
from torch.autograd.profiler import profile
from tqdm import tqdm

from data_module.batching.batch import RankBatch
from data_module.batching.batch_plan import Epochs
from model.settings import NetworkSettings
from pipeline.benchmark.baselines import Baseline, Precision
from pipeline.compat.pytorch import add_compile_callback, num_compiled_graphs, remove_compile_callback
from pipeline.monitoring.performance import MatrixProduct, training_flops

WARM_UP_STEPS = 5
MEMORY_STEPS = 2
"""Steps that measure memory. They are not timed, because measuring memory slows them."""
MEMORY_ROUND = 1
OURS = "ours"
"""Name of the recipe's own network."""


@dataclass(frozen=True)
class Round:
    """Measurements of a few timed steps of every network."""

    seconds: dict[str, float]
    """Seconds of a step, by network."""
    tokens: dict[str, float]
    """Target tokens of a step, without padding, by network."""
    source: NDArray[np.int64]
    """Lengths of our sources [pairs]."""
    target: NDArray[np.int64]
    """Lengths of our targets [pairs]."""
    row_tokens: int
    """Our tokens of both sides, padding included."""
    product_rate: float
    """FLOP/s of a large matrix product, measured right after the round."""


class PeakMemory:
    """Peak of the memory that tensors hold, relative to the time of construction.

    The size of the process is no measure: several networks share it, and its allocator keeps freed memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._profile = None if device.type == "cuda" else profile(profile_memory=True)
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


def kept_bytes(network: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes that are kept between steps: weights, buffers and the optimizer's moments."""
    tensors = [*network.parameters(), *network.buffers()]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Compilations:
    """Context manager that counts compilations: of new graphs, and of backward passes that are compiled later."""

    def __init__(self) -> None:
        self.count = 0
        """Number of compilations so far."""
        self._graphs_before = 0
        self._graphs_after: int | None = None

    @property
    def num_graphs(self) -> int:
        """Number of new graphs so far."""
        graphs = num_compiled_graphs() if self._graphs_after is None else self._graphs_after
        return graphs - self._graphs_before

    def __enter__(self) -> "Compilations":
        self._graphs_before, self._graphs_after = num_compiled_graphs(), None
        add_compile_callback(self._count_one)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._graphs_after = num_compiled_graphs()
        remove_compile_callback(self._count_one)

    def _count_one(self, _: Any) -> None:
        self.count += 1


class SideBySide(Callback):
    """Times `fit`'s training steps, lets the baselines take as many after each round, and ends training.

    The first round is the warm-up, the second one measures memory, all others measure time. A round in which something
    was compiled is begun again on the next batches.
    """

    def __init__(
        self,
        baselines: dict[str, Baseline],
        steps: int,
        round_steps: int,
        precision: Precision,
        epochs: Epochs,
    ) -> None:
        """Measure at least `steps` steps of each network, in rounds of `round_steps`.

        Args:
            baselines: networks to compare with, by name.
            steps: number of timed steps, rounded up to whole rounds.
            round_steps: number of steps of a round.
            precision: what the networks train on.
            epochs: what the batches are of; each epoch may have other lengths.
        """
        self.baselines = baselines
        self.rounds: list[Round] = []
        self.peak_memory: dict[str, int] = {}
        """Bytes, by network."""
        self._epochs = epochs
        self._device, self._product = precision[0], MatrixProduct(*precision)
        self._steps_of_rounds = [WARM_UP_STEPS, MEMORY_STEPS, *[round_steps] * -(-steps // round_steps)]
        self._round = 0
        self._batches: list[RankBatch] = []
        self._compilations, self._compiled_before = Compilations(), 0
        self._peak: PeakMemory | None = None
        self._started = 0.0
        self._bar = tqdm(total=len(self._steps_of_rounds), desc="measuring", unit="round", mininterval=1.0, leave=False)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the warm-up."""
        self._compilations.__enter__()
        self._start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: RankBatch, batch_idx: int
    ) -> None:
        """Count the step; at the end of a round, let the baselines take theirs."""
        self._batches.append(batch)
        if self._compilations.count > self._compiled_before:
            self._compiled_before = self._compilations.count
            self._batches = []
            self._start()
        elif len(self._batches) == self._steps_of_rounds[self._round]:
            self._end_round(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the progress bar and stop counting compilations."""
        self._bar.close()
        self._compilations.__exit__(None, None, None)

    def _end_round(self, trainer: Trainer, module: LightningModule) -> None:
        network = module.network
        assert isinstance(network, nn.Module)
        num_steps = len(self._batches)
        seconds = {OURS: self._finish(OURS, network, trainer.optimizers[0])}
        tokens = {OURS: sum(batch.num_target_tokens for batch in self._batches) / num_steps}
        for name, baseline in self.baselines.items():
            steps = [baseline.next_step() for _ in range(num_steps)]
            tokens[name] = sum(step.num_target_tokens for step in steps) / num_steps
            self._start()
            for step in steps:
                baseline.train(step)
            seconds[name] = self._finish(name, baseline.network, baseline.optimizer)
        if self._round > MEMORY_ROUND:
            self.rounds.append(self._measured(seconds, tokens))
        self._batches = []
        self._bar.update()
        self._round += 1
        trainer.should_stop = self._round == len(self._steps_of_rounds)
        self._start()

    def _start(self) -> None:
        """Begin to measure a network's part of the round."""
        self._end_peak()
        if self._round == MEMORY_ROUND:
            self._peak = PeakMemory(self._device)
        self._started = self._now()

    def _finish(self, name: str, network: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        """Return the seconds of a step of the network whose part has ended."""
        seconds = (self._now() - self._started) / len(self._batches)
        if self._round == MEMORY_ROUND:
            self.peak_memory[name] = self._end_peak() + kept_bytes(network, optimizer)
        return seconds

    def _end_peak(self) -> int:
        """Stop measuring memory, and return the peak."""
        peak, self._peak = self._peak, None
        return peak.read() if peak is not None else 0

    def _now(self) -> float:
        """Return the time in seconds after waiting for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _measured(self, seconds: dict[str, float], tokens: dict[str, float]) -> Round:
        lengths = [self._epochs.corpus(batch.epoch).lengths(batch.pairs.numpy()) for batch in self._batches]
        source, target = map(np.concatenate, zip(*lengths, strict=True))
        return Round(
            seconds=seconds,
            tokens=tokens,
            source=source,
            target=target,
            row_tokens=sum(batch.num_row_tokens for batch in self._batches),
            product_rate=self._product.rate(),
        )


def figures_of(comparison: SideBySide, network: NetworkSettings, vocabulary_size: int) -> dict[str, Any]:
    """Return our figures, the ratios and, under `baselines`, each baseline's figures.

    `train` documents the figures. Units are seconds, bytes and FLOP/s.
    """
    rounds = comparison.rounds
    source, target = (np.concatenate([vars(measured)[side] for measured in rounds]) for side in ("source", "target"))
    flops = training_flops(network, vocabulary_size, source, target) / float(target.sum())
    product_rate = float(np.median([measured.product_rate for measured in rounds]))

    def of_network(name: str) -> dict[str, Any]:
        rates = [measured.tokens[name] / measured.seconds[name] for measured in rounds]
        return {
            **_spread("target_tokens_per_second", rates),
            **_spread("step_seconds", [measured.seconds[name] for measured in rounds]),
            "peak_memory_bytes": comparison.peak_memory[name],
            "mfu": float(np.median(rates)) * flops / product_rate,
        }

    figures = {
        **of_network(OURS),
        "padding_share": 1.0 - float(source.sum() + target.sum()) / sum(measured.row_tokens for measured in rounds),
        "flops_per_target_token": flops,
        "ceiling_flops_per_second": product_rate,
        "baselines": {name: of_network(name) for name in comparison.baselines},
    }
    for name in comparison.baselines:
        ratios = [
            measured.tokens[OURS] / measured.seconds[OURS] * measured.seconds[name] / measured.tokens[name]
            for measured in rounds
        ]
        figures |= _spread(f"ratio_to_{name}", ratios)
    return figures


def table(figures: dict[str, Any]) -> str:
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


def _spread(name: str, values: list[float]) -> dict[str, Any]:
    """Return median and quartiles."""
    low, middle, high = (float(q) for q in np.percentile(values, (25, 50, 75)))
    return {name: middle, f"{name}_quartiles": [low, high]}
