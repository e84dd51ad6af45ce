"""Trains the recipe as `fit` does and, in turns, other networks on the same steps, so that drift hits all alike."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import Profiler
from numpy.typing import NDArray
from torch import Tensor, nn
from tqdm import tqdm

from data_module.batching.batch import MicroBatch, RankBatch
from model.lr_schedule import noam_learning_rate
from model.settings import TrainingSettings
from model.translation_module import TranslationModule
from pipeline.profiling.compilations import Compilations
from pipeline.profiling.machine import MatrixProduct
from pipeline.profiling.stopwatch import PeakMemory, Stopwatch, kept_bytes

WARM_UP_STEPS = 5
QUIET_STEPS = 50
"""Where the network is compiled, the warm-up lasts until this many steps in a row have compiled nothing: kinds of
batches that need a graph of their own can turn up late."""
MEMORY_STEPS = 2
"""After the warm-up, measured for memory, which slows them, and not for time."""


class BareLoop:
    """A training step as short as PyTorch allows: no Lightning, no statistics."""

    def __init__(
        self,
        network: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        settings: TrainingSettings,
        d_model: int,
        device: torch.device,
        autocast_dtype: torch.dtype,
    ) -> None:
        """Train `network` by `loss`, with the recipe's schedule, optimizer and clipping.

        Args:
            network: ids [B, S] and [B, T] and source mask -> anything that `loss` takes.
            loss: that and targets [B, T] -> the sum over target tokens.
            settings: the recipe's.
            d_model: what the schedule goes by.
            device: where to train.
            autocast_dtype: what products run in; float32 for no autocast.
        """
        self.network, self._loss, self._settings, self._d_model = network.to(device).train(), loss, settings, d_model
        self._device, self._dtype = device, autocast_dtype
        self._steps = 0
        betas = (settings.adam_beta1, settings.adam_beta2)
        self.optimizer = torch.optim.Adam(
            network.parameters(), lr=0.0, betas=betas, eps=settings.adam_epsilon, fused=True
        )

    def step(self, share: RankBatch, watch: Stopwatch) -> None:
        """One optimizer step."""
        self._steps += 1
        settings = self._settings
        for group in self.optimizer.param_groups:
            group["lr"] = noam_learning_rate(self._steps, self._d_model, settings)
        # Around the whole step, as ours: weights are cast once and not in every micro-batch.
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
            for batch in share.micro_batches:
                watch.begin("forward")
                outputs = self.network(batch.source, batch.target_input, batch.source_mask)
                watch.begin("loss")
                loss = self._loss(outputs, batch.target_output) / share.num_target_tokens
                watch.begin("backward")
                loss.backward()
        watch.begin("optimizer")
        if settings.gradient_clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), settings.gradient_clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        watch.begin("rest")


@dataclass(frozen=True)
class Turn:
    """A few steps that each network took."""

    seconds: dict[str, dict[str, float]]
    """Of each network, ours first: seconds a step in each stretch of it."""
    tokens: float
    """Target tokens a step, without padding."""
    source: NDArray[np.int64]
    """Lengths [pairs] without padding."""
    target: NDArray[np.int64]
    cells: int
    """Places for tokens on both sides, padding included."""
    ceiling: float
    """FLOP/s of a large matrix product right after."""


class SideBySide(Callback):
    """Stands beside `fit`'s training step, times it, and lets the others take the same steps.

    Of our step, `data_wait` is the loader's, `loss` lasts from the decoder's states to the backward pass (so it
    holds the fused loss's own gradient, which others work out in `backward`), `optimizer` also holds the gradient's
    norm, and `rest` is everything between these: Lightning, callbacks, the copy to the device.

    A turn in which something was compiled is not measured but taken again, on the next steps.
    """

    def __init__(
        self,
        others: dict[str, BareLoop],
        steps: int,
        turn_steps: int,
        device: torch.device,
        product_dtype: torch.dtype,
    ) -> None:
        """Measure `steps` steps of each, or a few more, `turn_steps` at a time."""
        self.others = others
        self.turns: list[Turn] = []
        self.peak_memory: dict[str, int] = {}
        """Bytes; by network, ours first, as in `num_parameters`."""
        self.num_parameters: dict[str, int] = {}
        self.warm_up_steps = 0
        """Our steps before the first turn that counts."""
        self.steps_taken_again = 0
        """Our steps in turns that did not count, since something was compiled in them."""
        self.num_steps = WARM_UP_STEPS + MEMORY_STEPS + -(-steps // turn_steps) * turn_steps
        """Our steps where nothing is compiled."""
        self._last_turn = 1 + -(-steps // turn_steps)
        self._turn_steps, self._device = turn_steps, device
        self._compilations, self._compiled_before, self._quiet_steps = Compilations(), 0, 0
        self._watch, self._product = Stopwatch(device), MatrixProduct(device, product_dtype)
        self._peak: PeakMemory | None = None
        self._turn = 0
        self._shares: list[RankBatch] = []
        self._micro_batches_left = 0
        self._bar = tqdm(total=self.num_steps, desc="measuring", unit="step", mininterval=1.0, leave=False)

    @property
    def num_graphs(self) -> int:
        """How many graphs our network was compiled to."""
        return self._compilations.num_graphs

    def loader_profiler(self) -> Profiler:
        """What the Trainer needs besides this callback: only a profiler hears it ask for data."""
        return _LoaderProfiler(self._watch)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look for where the network begins and ends; a hook of its own would be compiled with it."""
        assert isinstance(pl_module, TranslationModule)
        self._compilations.__enter__()
        if pl_module.compiled_forward is not None:
            self._bar.total = self.num_steps + QUIET_STEPS
        states = pl_module.states

        def timed_states(batch: MicroBatch) -> Tensor:
            self._watch.begin("forward")
            result = states(batch)
            self._watch.begin("loss")
            return result

        pl_module.states = timed_states  # type: ignore[method-assign]

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: RankBatch, batch_idx: int
    ) -> None:
        """Count down to the last backward pass."""
        self._micro_batches_left = len(batch.shapes)

    def on_before_backward(self, *_: Any) -> None:
        """The loss ends here."""
        self._watch.begin("backward")

    def on_after_backward(self, *_: Any) -> None:
        """After the last one stands the optimizer."""
        self._micro_batches_left -= 1
        self._watch.begin("rest" if self._micro_batches_left else "optimizer")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: RankBatch, batch_idx: int
    ) -> None:
        """After our turn come the others'."""
        self._watch.begin("rest")
        self._bar.update()
        self._shares.append(batch)
        compiled = self._compilations.count > self._compiled_before
        self._compiled_before = self._compilations.count
        if self._turn == 0:
            self._warm_up(trainer, pl_module, compiled)
        elif compiled:
            self._drop_turn()
        elif len(self._shares) == (MEMORY_STEPS if self._turn == 1 else self._turn_steps):
            self._end_turn(trainer, pl_module)

    def _warm_up(self, trainer: Trainer, module: LightningModule, compiled: bool) -> None:
        """The first turn lasts until all that is compiled has been, as far as can be known."""
        self.warm_up_steps += 1
        self._quiet_steps = 0 if compiled else self._quiet_steps + 1
        self._shares = self._shares[-WARM_UP_STEPS:]
        is_quiet = module.compiled_forward is None or self._quiet_steps >= QUIET_STEPS
        if self.warm_up_steps >= WARM_UP_STEPS and is_quiet:
            self._end_turn(trainer, module)

    def _drop_turn(self) -> None:
        """Forget what was measured of it, and begin it again."""
        self.steps_taken_again += len(self._shares)
        self._watch.read()
        if self._peak is not None:
            self._peak.read()
        self._shares = []
        self._start()

    def _end_turn(self, trainer: Trainer, module: LightningModule) -> None:
        network = module.network
        assert isinstance(network, nn.Module)
        seconds = {"ours": self._finish("ours", network, trainer.optimizers[0])}
        for name, other in self.others.items():
            self._start()
            for share in self._shares:
                other.step(share, self._watch)
            seconds[name] = self._finish(name, other.network, other.optimizer)
        if self._turn > 1:
            self.turns.append(self._measured(seconds))
        trainer.should_stop = self._turn == self._last_turn
        self._turn += 1
        self._shares = []
        self._start()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the bar."""
        self._bar.close()
        self._compilations.__exit__(None, None, None)

    def _start(self) -> None:
        if self._turn == 1:
            self._peak = PeakMemory(self._device)
        self._watch.begin("rest")

    def _finish(self, name: str, network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
        seconds = self._watch.read()
        self.num_parameters[name] = sum(p.numel() for p in network.parameters() if p.requires_grad)
        if self._peak is not None:
            self.peak_memory[name] = self._peak.read() + kept_bytes(network, optimizer)
            self._peak = None
        return {stretch: s / len(self._shares) for stretch, s in seconds.items()}

    def _measured(self, seconds: dict[str, dict[str, float]]) -> Turn:
        pad = self._shares[0].pad
        batches = [batch for share in self._shares for batch in share.to("cpu").micro_batches]
        return Turn(
            seconds=seconds,
            tokens=sum(share.num_target_tokens for share in self._shares) / len(self._shares),
            source=np.concatenate([(batch.source != pad).sum(1).numpy() for batch in batches]),
            target=np.concatenate([(batch.target_output != pad).sum(1).numpy() for batch in batches]),
            cells=sum(batch.source.numel() + batch.target_output.numel() for batch in batches),
            ceiling=self._product.rate(),
        )


class _LoaderProfiler(Profiler):
    def __init__(self, watch: Stopwatch) -> None:
        super().__init__()
        self._watch = watch

    def start(self, action_name: str) -> None:
        """Called by Lightning around all that it does."""
        if action_name.endswith("train_dataloader_next"):
            self._watch.begin("data_wait")

    def stop(self, action_name: str) -> None:
        """As `start`."""
        if action_name.endswith("train_dataloader_next"):
            self._watch.begin("rest")
