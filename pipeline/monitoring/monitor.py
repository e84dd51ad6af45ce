"""Training's scalars: is it learning, and is it fast?"""

import atexit
import math
import signal
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from data_module.batching.batch import RankBatch
from data_module.errors import InputError
from pipeline.monitoring.mfu import best_rate
from pipeline.monitoring.progress import Progress
from pipeline.profiling.step_clock import StepClock
from pipeline.runtime.console import say

SKIPPED_AT_MOST = 20
"""So many steps in a row without a finite gradient are no accident."""


class Monitor(Callback):
    """Loss, learning rate, gradient norm, speed and where time goes, every so many steps.

    Sums stay on the device; they are read, over all ranks, at the interval only, and so is how many steps were skipped.
    """

    @property
    def state_key(self) -> str:
        """Key of the state in checkpoints: the class name in version 0.1.0."""
        return "Monitor"

    def __init__(self, every_steps: int, flops_per_target_token: float = 0.0) -> None:
        self._every = every_steps
        self._flops_per_token = flops_per_target_token
        self.submitted = time.time()
        """When the run was first asked for, in seconds since the epoch."""
        self.clock = StepClock()
        self._rate = 0.0
        self._progress: Progress | None = None
        self._sums: Tensor | None = None
        self._steps = self._target_tokens = self._cells = self._tokens = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure what the machine can do, and begin to count."""
        if self._flops_per_token:
            self._rate = best_rate(pl_module.device, str(trainer.precision))
        if trainer.is_global_zero:
            self._progress = Progress(trainer.global_step, trainer.max_steps)
        loader = trainer.train_dataloader
        if loader is not None:
            loader.on_wait = self.clock.begin
        self.clock.start(pl_module.device)
        self._restart()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: RankBatch, batch_idx: int
    ) -> None:
        """The step itself begins."""
        self.clock.begin("compute")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: RankBatch, batch_idx: int
    ) -> None:
        """Add up, and at the interval read and log."""
        self.clock.begin("between")
        sums = torch.stack([outputs[name] for name in ("smoothed", "likelihood", "correct", "tokens")])
        self._sums = sums if self._sums is None else self._sums + sums
        self._steps += 1
        self._target_tokens += batch.num_target_tokens
        self._cells += sum(pairs * (source + target) for pairs, source, target in batch.shapes)
        self._tokens += batch.num_tokens
        if self._progress is not None:
            self._progress.advance()
        if trainer.global_step % self._every == 0:
            self._log(trainer, outputs, batch)
            self._restart()

    def _log(self, trainer: Trainer, outputs: dict[str, Any], batch: RankBatch) -> None:
        assert self._sums is not None
        cells = torch.tensor([self._cells, self._tokens], device=self._sums.device)
        total = trainer.strategy.reduce(torch.cat((self._sums, cells)), reduce_op="sum")
        # All that is read, at once: each reading waits for the device.
        numbers = torch.stack([*total, outputs["gradient_norm"], outputs["skipped"], outputs["skipped_in_a_row"]])
        smoothed, likelihood, correct, tokens, all_cells, filled, norm, skipped, in_a_row = numbers.tolist()
        _end_if_diverging(trainer.global_step, int(in_a_row))
        scalars = {
            "train/learning_rate": outputs["learning_rate"],
            "train/gradient_norm": norm,
            "train/skipped_steps": skipped,
            "perf/epoch": batch.epoch + (batch.index + 1) / batch.num_batches,
            "perf/padding_share": 1.0 - filled / all_cells,
            "perf/memory_gigabytes": memory_bytes(self._sums.device) / 1e9,
            **self._speed(trainer),
        }
        shown = {"tokens/s": f"{scalars['perf/target_tokens_per_second']:,.0f}"}
        if skipped:
            shown["skipped"] = f"{skipped:.0f}"
        if tokens:  # of every rank, which are equally many
            tokens /= trainer.world_size
            scalars |= {
                "train/loss": smoothed / tokens,
                "train/negative_log_likelihood": likelihood / tokens,
                "train/perplexity": math.exp(min(likelihood / tokens, 50.0)),
                "train/accuracy": correct / tokens,
            }
            shown = {"loss": f"{smoothed / tokens:.3f}", **shown}
        if trainer.logger is not None:
            trainer.logger.log_metrics(scalars, step=trainer.global_step)
        if self._progress is not None:
            self._progress.show(shown)

    def _speed(self, trainer: Trainer) -> dict[str, float]:
        """This rank's time a step, and what all ranks get done in it; validation and checkpoints are not counted."""
        lap = self.clock.lap()
        seconds = sum(lap.values())
        speed = self._target_tokens / max(seconds, 1e-9)
        waited = communication_wait(trainer)
        scalars = {
            "perf/target_tokens_per_second": speed,
            "perf/step_seconds": seconds / self._steps,
            "perf/step_seconds_data_wait": lap["data_wait"] / self._steps,
            "perf/step_seconds_compute": lap["compute"] / self._steps - (waited or 0.0),
            "perf/goodput": self.clock.counted_seconds / max(time.time() - self.submitted, 1e-9),
        }
        if waited is not None:
            scalars["perf/step_seconds_communication_wait"] = waited
        if self._rate:
            scalars["perf/mfu"] = speed * self._flops_per_token / (self._rate * trainer.world_size)
        return scalars

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validation's time is not training's."""
        self.clock.begin("validation")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the scores, and go on counting."""
        self.clock.begin("between")
        metrics = trainer.callback_metrics
        if "validation/bleu" in metrics and not trainer.sanity_checking and self._progress is not None:
            bleu, chrf, loss, perplexity = (
                float(metrics[f"validation/{name}"]) for name in ("bleu", "chrf", "loss", "perplexity")
            )
            say(
                f"step {trainer.global_step}: validation BLEU {bleu:.2f}, chrF {chrf:.2f}, loss {loss:.4f}, "
                f"perplexity {perplexity:.3f}"
            )
            self._progress.show({"BLEU": f"{bleu:.2f}"})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the bar."""
        if self._progress is not None:
            self._progress.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the last word to the error itself."""
        if self._progress is not None:
            self._progress.close()
        launcher = trainer.strategy.launcher
        if launcher is not None:
            # The ranks that this one has started would wait for it, then say at length that it has gone.
            atexit.register(launcher.kill, signal.SIGKILL)

    def goodput(self) -> float:
        """The share of wall time, since the run was first asked for, that went into the steps it consists of."""
        self.clock.read()
        return self.clock.counted_seconds / max(time.time() - self.submitted, 1e-9)

    def state_dict(self) -> dict[str, Any]:
        """Carried over a resume: steps that are taken again count once."""
        self.clock.read()
        return {"counted_seconds": self.clock.counted_seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As `state_dict` gave it."""
        self.clock.counted_seconds = state_dict["counted_seconds"]

    def _restart(self) -> None:
        self._sums = None
        self._steps = self._target_tokens = self._cells = self._tokens = 0


def communication_wait(trainer: Trainer) -> float | None:
    """Seconds a step in which gradients travelled and nothing was computed; None where ranks don't exchange any.

    It is DDP's own mean over the steps that it has timed, one in a hundred.
    """
    model = trainer.strategy.model
    if not isinstance(model, DistributedDataParallel):
        return None
    timed = model._get_ddp_logging_data()
    nanoseconds = timed.get("avg_backward_comm_time", 0) - timed.get("avg_backward_compute_comm_overlap_time", 0)
    return max(nanoseconds, 0) / 1e9


def memory_bytes(device: torch.device) -> int:
    """What this process has needed so far on a GPU; on a CPU, what it holds now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if not status.exists():  # not Linux
        return 0
    return int(status.read_text().split("VmRSS:")[1].split()[0]) << 10


def _end_if_diverging(step: int, skipped_in_a_row: int) -> None:
    """Raises InputError when too many steps in a row had no finite gradient; every rank has counted the same."""
    if skipped_in_a_row >= SKIPPED_AT_MOST:
        raise InputError(
            f"step {step}: the last {skipped_in_a_row} steps had no finite gradient and were skipped, the weights are "
            f"those of step {step - skipped_in_a_row}; go on with trainer.precision 32-true, or begin another "
            "run.folder with --init-from, a lower training.learning_rate_factor or training.gradient_clip_norm"
        )
