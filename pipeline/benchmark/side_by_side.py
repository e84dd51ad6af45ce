"""Train the recipe as `fit` does and, in turns with it, other networks.

Taking turns exposes all networks to the same changes in the machine's speed.
"""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from numpy.typing import NDArray
from torch import nn
from tqdm import tqdm

from data_module.batching.batch import RankBatch
from data_module.batching.batch_plan import Epochs
from pipeline.benchmark.baselines import Baseline, Precision
from pipeline.profiling.compilations import Compilations
from pipeline.profiling.machine import MatrixProduct
from pipeline.profiling.stopwatch import PeakMemory, kept_bytes

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
