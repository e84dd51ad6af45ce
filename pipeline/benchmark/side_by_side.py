"""Train the recipe as `fit` does and, alternating with it, other networks.

Alternating exposes all networks to the same changes in the machine's speed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import Profiler
from numpy.typing import NDArray
from torch import Tensor, nn
from tqdm import tqdm

from data_module.batching.batch import PackedBatch, PaddedBatch, RankBatch
from model.lr_schedule import Schedule
from model.optimizer import build_optimizer
from model.settings import TrainingSettings
from model.translation_module import TranslationModule
from pipeline.profiling.compilations import Compilations
from pipeline.profiling.machine import MatrixProduct
from pipeline.profiling.stopwatch import PeakMemory, Stopwatch, kept_bytes

WARM_UP_STEPS = 5
QUIET_STEPS = 50
"""The warm-up of a compiled network ends after this many consecutive steps without a compilation.

Batch shapes that need a graph of their own can appear late.
"""
MEMORY_STEPS = 2
"""Steps after the warm-up that measure memory. They are not timed because measuring memory slows them."""


class LoopStep(NamedTuple):
    """The data of one optimizer step of a `BareLoop`."""

    micro_batches: list[Any]
    """Each has `target_output`, the labels."""
    num_target_tokens: int


def padded_forward(network: nn.Module, batch: PaddedBatch) -> Tensor:
    """Call a network that takes source ids [B, S], target ids [B, T] and a source mask [B, S]."""
    result: Tensor = network(batch.source, batch.target_input, batch.source_mask)
    return result


class BareLoop:
    """A minimal training loop in plain PyTorch, without Lightning and without statistics."""

    def __init__(
        self,
        network: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        settings: TrainingSettings,
        schedule: Schedule,
        precision: tuple[torch.device, torch.dtype],
        steps: Callable[[RankBatch], LoopStep] | None = None,
        forward: Callable[[nn.Module, Any], Tensor] = padded_forward,
    ) -> None:
        """Prepare to train `network` with the recipe's schedule, optimizer and clipping.

        Args:
            network: the network.
            loss: maps the network's output and the labels to the sum over target tokens.
            settings: the recipe's training settings.
            schedule: learning rate of each step.
            precision: device to train on, and type of matrix products; float32 for no autocast.
            steps: maps a step's batch of the network that it is compared with to its own; None for the same.
            forward: maps the network and a micro-batch to the input of `loss`.
        """
        self._device, self._dtype = precision
        self.network, self._loss = network.to(self._device).train(), loss
        self._settings, self._schedule = settings, schedule
        self._own_step, self._forward = steps, forward
        self._steps = 0
        self.optimizer = build_optimizer(network.parameters(), settings)

    def next_step(self, batch: RankBatch) -> LoopStep:
        """Return the data of the next step on the device; `batch` is what the other network has taken."""
        if self._own_step is None:
            return LoopStep(list(batch.micro_batches), batch.num_target_tokens)
        return self._own_step(batch)

    def step(self, batch: LoopStep, watch: Stopwatch) -> None:
        """Take one optimizer step."""
        self._steps += 1
        settings = self._settings
        for group in self.optimizer.param_groups:
            group["lr"] = self._schedule(self._steps)
        # Around the whole step, as in `fit`: weights are cast once and not in every micro-batch.
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
            for micro_batch in batch.micro_batches:
                watch.begin("forward")
                outputs = self._forward(self.network, micro_batch)
                watch.begin("loss")
                loss = self._loss(outputs, micro_batch.target_output) / batch.num_target_tokens
                watch.begin("backward")
                loss.backward()
        watch.begin("optimizer")
        if settings.gradient_clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), settings.gradient_clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        watch.begin("rest")


@dataclass(frozen=True)
class Round:
    """Measurements of a few steps of every network."""

    seconds: dict[str, dict[str, float]]
    """Seconds of each phase of a step, by network; "ours" comes first."""
    tokens: dict[str, float]
    """Target tokens of a step, without padding, by network."""
    source: NDArray[np.int64]
    """Lengths of our sources [pairs]."""
    target: NDArray[np.int64]
    """Lengths of our targets [pairs]."""
    padded_tokens: int
    """Our tokens of both sides, including dead ones."""
    product_rate: float
    """FLOP/s of a large matrix product, measured right after the round."""


class SideBySide(Callback):
    """Times `fit`'s training step, then lets the other networks take as many steps.

    Phases of our step: `data_wait` waits for the loader. `loss` lasts from the decoder's states to the backward pass.
    It includes the gradient of the fused loss, which other networks compute in `backward`. `optimizer` includes the
    gradient's norm. `rest` is everything else: Lightning, callbacks and the copy to the device.

    A round in which something was compiled is discarded and repeated on the next batches.
    """

    def __init__(
        self,
        others: dict[str, BareLoop],
        steps: int,
        round_steps: int,
        precision: tuple[torch.device, torch.dtype],
        lengths: tuple[NDArray[np.integer], NDArray[np.integer]],
    ) -> None:
        """Measure at least `steps` steps of each network, in rounds of `round_steps`.

        Args:
            others: networks to compare with, by name.
            steps: number of steps, rounded up to whole rounds.
            round_steps: number of steps of a round.
            precision: device that the networks train on, and type of matrix products.
            lengths: source and target lengths [pairs] of the corpus, including EOS.
        """
        device, product_dtype = precision
        self._lengths = lengths
        self.others = others
        self.rounds: list[Round] = []
        self.peak_memory: dict[str, int] = {}
        """Bytes, by network."""
        self.num_parameters: dict[str, int] = {}
        """Trainable parameters, by network."""
        self.warm_up_steps = 0
        """Our steps before the first measured round."""
        self.steps_taken_again = 0
        """Our steps in rounds that were discarded because something was compiled."""
        self.num_steps = WARM_UP_STEPS + MEMORY_STEPS + -(-steps // round_steps) * round_steps
        """Our steps if nothing is compiled."""
        self._last_round = 1 + -(-steps // round_steps)
        self._round_steps, self._device = round_steps, device
        self._compilations, self._compiled_before, self._quiet_steps = Compilations(), 0, 0
        self._watch, self._product = Stopwatch(device), MatrixProduct(device, product_dtype)
        self._peak: PeakMemory | None = None
        # 0 is the warm-up, 1 measures memory.
        self._round = 0
        self._batches: list[RankBatch] = []
        self._micro_batches_left = 0
        self._bar = tqdm(total=self.num_steps, desc="measuring", unit="step", mininterval=1.0, leave=False)

    @property
    def num_graphs(self) -> int:
        """Number of graphs that our network was compiled to."""
        return self._compilations.num_graphs

    def loader_profiler(self) -> Profiler:
        """Return a profiler for the Trainer that times the wait for data, which callbacks cannot see."""
        return _LoaderProfiler(self._watch)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Time the network by wrapping `states`; a forward hook would be compiled with the network."""
        assert isinstance(pl_module, TranslationModule)
        self._compilations.__enter__()
        if pl_module.compiled_forward is not None:
            self._bar.total = self.num_steps + QUIET_STEPS
        states = pl_module.states

        def timed_states(batch: PackedBatch | PaddedBatch) -> Tensor:
            self._watch.begin("forward")
            result = states(batch)
            self._watch.begin("loss")
            return result

        pl_module.states = timed_states  # type: ignore[method-assign]

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: RankBatch, batch_idx: int
    ) -> None:
        """Remember the number of backward passes to come."""
        self._micro_batches_left = len(batch.shapes)

    def on_before_backward(self, *_: Any) -> None:
        """End the loss phase."""
        self._watch.begin("backward")

    def on_after_backward(self, *_: Any) -> None:
        """Begin the optimizer phase after the last micro-batch."""
        self._micro_batches_left -= 1
        self._watch.begin("rest" if self._micro_batches_left else "optimizer")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: RankBatch, batch_idx: int
    ) -> None:
        """Count the step; at the end of a round, let the other networks take it."""
        self._watch.begin("rest")
        self._bar.update()
        self._batches.append(batch)
        compiled = self._compilations.count > self._compiled_before
        self._compiled_before = self._compilations.count
        if self._round == 0:
            self._warm_up(trainer, pl_module, compiled)
        elif compiled:
            self._discard_round()
        elif len(self._batches) == (MEMORY_STEPS if self._round == 1 else self._round_steps):
            self._end_round(trainer, pl_module)

    def _warm_up(self, trainer: Trainer, module: LightningModule, compiled: bool) -> None:
        """End the first round once no compilation is expected any more."""
        self.warm_up_steps += 1
        self._quiet_steps = 0 if compiled else self._quiet_steps + 1
        self._batches = self._batches[-WARM_UP_STEPS:]
        is_quiet = module.compiled_forward is None or self._quiet_steps >= QUIET_STEPS
        if self.warm_up_steps >= WARM_UP_STEPS and is_quiet:
            self._end_round(trainer, module)

    def _discard_round(self) -> None:
        """Discard the round's measurements and begin it again."""
        self.steps_taken_again += len(self._batches)
        self._watch.read()
        if self._peak is not None:
            self._peak.read()
        self._batches = []
        self._start()

    def _end_round(self, trainer: Trainer, module: LightningModule) -> None:
        network = module.network
        assert isinstance(network, nn.Module)
        seconds = {"ours": self._finish("ours", network, trainer.optimizers[0])}
        tokens = {"ours": sum(batch.num_target_tokens for batch in self._batches) / len(self._batches)}
        for name, other in self.others.items():
            steps = [other.next_step(batch) for batch in self._batches]
            tokens[name] = sum(step.num_target_tokens for step in steps) / len(steps)
            self._start()
            for step in steps:
                other.step(step, self._watch)
            seconds[name] = self._finish(name, other.network, other.optimizer)
        if self._round > 1:
            self.rounds.append(self._measured(seconds, tokens))
        trainer.should_stop = self._round == self._last_round
        self._round += 1
        self._batches = []
        self._start()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the progress bar and stop counting compilations."""
        self._bar.close()
        self._compilations.__exit__(None, None, None)

    def _start(self) -> None:
        if self._round == 1:
            self._peak = PeakMemory(self._device)
        self._watch.begin("rest")

    def _finish(self, name: str, network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
        seconds = self._watch.read()
        self.num_parameters[name] = sum(p.numel() for p in network.parameters() if p.requires_grad)
        if self._peak is not None:
            self.peak_memory[name] = self._peak.read() + kept_bytes(network, optimizer)
            self._peak = None
        return {phase: s / len(self._batches) for phase, s in seconds.items()}

    def _measured(self, seconds: dict[str, dict[str, float]], tokens: dict[str, float]) -> Round:
        pairs = torch.cat([batch.pairs for batch in self._batches]).numpy()
        source, target = (side[pairs].astype(np.int64) for side in self._lengths)
        return Round(
            seconds=seconds,
            tokens=tokens,
            source=source,
            target=target,
            padded_tokens=sum(batch.num_row_tokens for batch in self._batches),
            product_rate=self._product.rate(),
        )


class _LoaderProfiler(Profiler):
    def __init__(self, watch: Stopwatch) -> None:
        super().__init__()
        self._watch = watch

    def start(self, action_name: str) -> None:
        """Begin the phase when Lightning asks the loader for a batch."""
        if action_name.endswith("train_dataloader_next"):
            self._watch.begin("data_wait")

    def stop(self, action_name: str) -> None:
        """End the phase when the batch is there."""
        if action_name.endswith("train_dataloader_next"):
            self._watch.begin("rest")
