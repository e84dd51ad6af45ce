"""Metrics of training: loss, learning rate, gradient norm, throughput, the parts of a step's time; and its progress."""

import atexit
import math
import signal
import sys
import time
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from data_module.batch import PaddedBatch, RankBatch
from data_module.errors import InputError
from data_module.system.files import PlainValues
from data_module.system.text_files import progress_bar
from model.backend import Backend
from model.training_module import StepOutputs
from pipeline.config.settings import LIKELIHOOD, validation_tag
from pipeline.metrics.metrics import title_and_score
from pipeline.monitoring.performance import Stragglers, matmul_rate, slowest_rank
from pipeline.monitoring.validation_metrics import quality
from pipeline.ranks.rank_messages import plain, value_of_each_rank
from pipeline.runtime.console import report, say
from pipeline.runtime.launch import node_name
from pipeline.runtime.memory import can_measure_peak, private_memory
from pipeline.runtime.step_clock import OWN, StepClock
from pipeline.runtime.torch_private import call_after_backward

FIRST_LINE_SECONDS = 10.0
"""How long after its start a run shows the time left, unless it has logged a step by then."""
MAX_SKIPPED_IN_A_ROW = 20
"""Training ends with an error after this many consecutive steps without a finite gradient."""
SECONDS_BETWEEN_LINES = 60.0
"""Seconds between lines of progress, where there is no bar."""


class Progress:
    """Shows the step, metrics and the time left on standard error."""

    def __init__(self, first_step: int, last_step: int, steps_between_validations: int | None) -> None:
        """Start at `first_step`; `steps_between_validations` is None for training without validation."""
        self._step = first_step
        self._last = last_step
        self._between_validations = steps_between_validations
        self.validation_seconds: float | None = None
        """Seconds of the last validation; None before the first one of a run."""
        self._next_line = 0.0
        self._metrics: dict[str, str] = {}
        self._bar: tqdm[NoReturn] | None = None
        if sys.stderr.isatty():
            self._bar = tqdm(
                total=last_step,
                initial=first_step,
                desc="training",
                unit="step",
                # Without tqdm's own estimate of the time left, which takes a validation for a slow step.
                bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]",
                file=sys.stderr,
                mininterval=0.5,
                dynamic_ncols=True,
            )
        else:
            say(f"training: from step {first_step:,} to {last_step:,}")

    def advance(self) -> None:
        """Count one step."""
        self._step += 1
        if self._bar is not None:
            self._bar.update(1)

    def show(self, metrics: dict[str, str], seconds_per_step: float | None = None) -> None:
        """Show new values, and the time left if `seconds_per_step` is given; other metrics keep their last values."""
        self._metrics |= metrics
        left = None if seconds_per_step is None else self._time_left(seconds_per_step)
        if self._bar is not None:
            if left is not None:
                self._metrics |= {"left": left}
            self._bar.set_postfix(self._metrics, refresh=False)
        elif time.monotonic() >= self._next_line or self._step >= self._last:
            self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES
            values = [f"{name} {value}" for name, value in self._metrics.items()]
            values += [] if left is None else [f"{left} left"]
            say(f"training: step {self._step:,} of {self._last:,}: {', '.join(values)}")

    def _time_left(self, seconds_per_step: float) -> str:
        every = self._between_validations
        validations = 0 if every is None else self._last // every - self._step // every
        seconds = (self._last - self._step) * seconds_per_step + validations * (self.validation_seconds or 0.0)
        return str(timedelta(seconds=round(seconds)))

    def close(self) -> None:
        """Stop updating the bar, and leave it on the screen."""
        if self._bar is not None:
            self._bar.close()


class TrainingMonitor(Callback):
    """Logs the metrics of training every `every_steps` steps.

    Sums over steps and ranks stay on the device and are read when they are logged, since reading waits for the device.
    `flops_per_target_token` are those of the MFU, which is not logged if they are 0. `backend` is this rank's, to
    compare with rank 0's.
    """

    def __init__(
        self,
        every_steps: int,
        flops_per_target_token: float = 0.0,
        backend: Backend = Backend(),  # noqa: B008
        best_by: str = "bleu",
    ) -> None:
        self._every_steps = every_steps
        self._flops_per_token = flops_per_target_token
        self._backend = backend
        self._best_by = best_by
        self.submitted = time.time()
        """When the run was first submitted, in seconds since the epoch."""
        self.clock = StepClock()
        self._matmul_rate = 0.0
        self._progress: Progress | None = None
        self._first_line_at = math.inf
        self._seconds_per_step: float | None = None
        self._validation_started = 0.0
        self._validation = ExitStack()
        self._validation_bar: tqdm[NoReturn] | None = None
        self._validation_seconds: float | None = None
        self._validated_step = 0
        self._sums: Tensor | None = None
        self._steps = self._target_tokens = self._padded_tokens = self._tokens = 0
        self.nodes: list[str] = []
        """The node of each rank, from the start of training on."""
        self._ddp: DistributedDataParallel | None = None
        self._stragglers: Stragglers | None = None
        self._own_steps, self._own_step_seconds = 0, 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure the machine's rate, say if this rank's backend differs from rank 0's, and start the clock."""
        if self._flops_per_token:
            self._matmul_rate = matmul_rate(pl_module.device, str(trainer.precision))
        if trainer.is_global_zero:
            every = trainer.val_check_interval
            validates = trainer.enable_validation and isinstance(every, int)
            self._progress = Progress(trainer.global_step, trainer.max_steps, int(every) if validates else None)
            self._progress.validation_seconds = self._validation_seconds
            self._first_line_at = time.monotonic() + FIRST_LINE_SECONDS
        ranks = plain(value_of_each_rank([node_name(), self._backend.summary()]))
        self.nodes = [node for node, _ in ranks]
        (_, first), (node, own) = ranks[0], ranks[trainer.global_rank]
        if different := [f"{part} {one}, not {first[part]}" for part, one in own.items() if one != first[part]]:
            reasons = f" ({'; '.join(self._backend.notes)})" if self._backend.notes else ""
            report(
                f"another backend than rank 0's on rank {trainer.global_rank} on {node}: {'; '.join(different)}"
                f"{reasons}; results agree up to rounding, and all ranks wait for the slowest one"
            )
        model = trainer.strategy.model
        if isinstance(model, DistributedDataParallel) and trainer.world_size > 1:
            self._ddp, self._stragglers = model, Stragglers(self.nodes)
        loader = trainer.train_dataloader
        if loader is not None:
            loader.on_wait = self.clock.begin
        self.clock.start(pl_module.device)
        self._reset()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: RankBatch, batch_idx: int
    ) -> None:
        """Count time as computation from here on."""
        self.clock.begin("compute")

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """In a backward pass in which DDP reduces gradients, count the time after this rank's own part as waiting."""
        if self._ddp is not None and self._ddp.require_backward_grad_sync:
            call_after_backward(loss, partial(self.clock.begin, "communication_wait"))

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count time as computation again."""
        if self._ddp is not None and self._ddp.require_backward_grad_sync:
            self.clock.begin("compute")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: RankBatch, batch_idx: int
    ) -> None:
        """Add the step to the sums, and log them every `every_steps` steps."""
        self.clock.begin("loop_overhead")
        sums = torch.stack([outputs[name] for name in ("smoothed", "negative_log_likelihood", "correct", "tokens")])
        self._sums = sums if self._sums is None else self._sums + sums
        self._steps += 1
        self._target_tokens += batch.num_target_tokens
        self._padded_tokens += batch.num_row_tokens
        self._tokens += batch.num_tokens
        if self._progress is not None:
            self._progress.advance()
            if time.monotonic() >= self._first_line_at:
                self.clock.read()
                self._progress.show({}, sum(self.clock.since_lap.values()) / self._steps)
                self._first_line_at = math.inf
        if trainer.global_step % self._every_steps == 0:
            self._log(trainer, outputs, batch)
            self._reset()

    def _log(self, trainer: Trainer, outputs: StepOutputs, batch: RankBatch) -> None:
        assert self._sums is not None
        # Each rank sets its own element, the time of the previous interval: reading this interval's would have to wait.
        own = [0.0] * len(self.nodes)
        own[trainer.global_rank] = self._own_step_seconds
        counts = torch.tensor([self._padded_tokens, self._tokens, *own], device=self._sums.device)
        self.clock.begin("communication_wait")
        total = trainer.strategy.reduce(torch.cat((self._sums, counts)), reduce_op="sum")
        self.clock.begin("loop_overhead")
        # One transfer for all values, because each transfer waits for the device.
        values = torch.stack([outputs["gradient_norm"], outputs["skipped"], outputs["skipped_in_a_row"], *total])
        norm, skipped, in_a_row, smoothed, nll, correct, loss_tokens, padded, tokens, *own = values.tolist()
        _raise_if_diverged(trainer.global_step, int(in_a_row))
        scalars = {
            "train/learning_rate": outputs["learning_rate"],
            "train/gradient_norm": norm,
            "train/skipped_steps": skipped,
            "train_perf/epoch": batch.epoch + (batch.index + 1) / batch.num_batches,
            "train_perf/padding_share": 1.0 - tokens / max(padded, 1.0),
            "train_perf/memory_gigabytes": memory_bytes(self._sums.device) / 1e9,
            **self._compare_ranks(own),
            **self._throughput(trainer),
        }
        shown = {"tokens/s": f"{scalars['train_perf/target_tokens_per_second']:,.0f}"}
        if skipped:
            shown["skipped"] = f"{skipped:.0f}"
        if loss_tokens:
            loss_tokens /= trainer.world_size  # every rank has counted the tokens of all ranks
            scalars |= {
                "train/loss": smoothed / loss_tokens,
                "train/negative_log_likelihood": nll / loss_tokens,
                "train/perplexity": math.exp(min(nll / loss_tokens, 50.0)),
                "train/accuracy": correct / loss_tokens,
            }
            shown = {"loss": f"{smoothed / loss_tokens:.3f}", **shown}
        if trainer.logger is not None:
            trainer.logger.log_metrics(scalars, step=trainer.global_step)
        if self._progress is not None:
            self._seconds_per_step, self._first_line_at = scalars["train_perf/step_seconds"], math.inf
            self._progress.show(shown, self._seconds_per_step)

    def _compare_ranks(self, own_step_seconds: list[float]) -> dict[str, float]:
        """Return the curves of the slowest rank in the previous interval, if there was one, and report slow ranks."""
        if self._stragglers is None or not self._own_steps:
            return {}
        for line in self._stragglers.add(own_step_seconds, self._own_steps):
            say(line)
        rank, ratio = slowest_rank(own_step_seconds)
        return {"train_perf/slowest_rank": rank, "train_perf/slowest_rank_over_median": ratio}

    def _throughput(self, trainer: Trainer) -> dict[str, float]:
        """Return this rank's time per step and the throughput of all ranks, without validation and checkpoints."""
        lap = self.clock.lap()
        seconds = sum(lap.values())
        tokens_per_second = self._target_tokens / max(seconds, 1e-9)
        self._own_steps, self._own_step_seconds = self._steps, sum(lap[phase] for phase in OWN) / self._steps
        scalars = {
            "train_perf/target_tokens_per_second": tokens_per_second,
            "train_perf/step_seconds": seconds / self._steps,
            "train_perf/step_seconds_data_wait": lap["data_wait"] / self._steps,
            "train_perf/step_seconds_compute": lap["compute"] / self._steps,
        }
        if (goodput := self.goodput()) is not None:
            scalars["train_perf/goodput"] = goodput
        if self._ddp is not None:
            scalars["train_perf/step_seconds_communication_wait"] = lap["communication_wait"] / self._steps
        if self._matmul_rate:
            flops_per_second = tokens_per_second * self._flops_per_token
            scalars["train_perf/mfu"] = flops_per_second / (self._matmul_rate * trainer.world_size)
        return scalars

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count time as validation from here on."""
        self.clock.begin("validation")
        self._validation_started = time.monotonic()
        count, is_shown = sum(trainer.num_val_batches), self._progress is not None
        bar = progress_bar("validating", int(count), unit="batches", show=is_shown)
        self._validation_bar = self._validation.enter_context(bar)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: PaddedBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Count a batch on the progress bar."""
        assert self._validation_bar is not None
        self._validation_bar.update()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the scores, and count time as training again."""
        self._validation.close()
        self.clock.begin("loop_overhead")
        self._validation_seconds = time.monotonic() - self._validation_started
        self._validated_step = trainer.global_step
        if self._progress is not None:
            self._progress.validation_seconds = self._validation_seconds
        metrics = trainer.callback_metrics
        if "validation/loss" in metrics and self._progress is not None:
            loss, perplexity = (float(metrics[f"validation/{name}"]) for name in ("loss", "perplexity"))
            best = title_and_score(self._best_by, float(metrics[validation_tag(self._best_by)]))
            first = best if self._best_by == LIKELIHOOD else ""
            parts = [first, quality(metrics, self._best_by), f"loss {loss:.4f}"]
            say(f"step {trainer.global_step}: validation {', '.join(filter(None, parts))}, perplexity {perplexity:.3f}")
            name, score = best.rsplit(maxsplit=1)
            self._progress.show({name: score}, self._seconds_per_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the progress bar, and warn if the last step was not validated."""
        if self._progress is not None:
            self._progress.close()
        every, last = trainer.val_check_interval, trainer.global_step
        if trainer.enable_validation and isinstance(every, int) and self._validated_step != last:
            because = f"it is no multiple of trainer.val_check_interval {every}"
            if self._validation_seconds is None:
                because = (
                    f"trainer.val_check_interval is {every}, so the run has no validation and no best.ckpt; lower it"
                )
            say(f"warning: step {last}, the last one, was not validated: {because}")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Close the progress bars; when this process exits, kill the ranks that Lightning has launched."""
        self._validation.close()
        if self._progress is not None:
            self._progress.close()
        launcher = trainer.strategy.launcher
        if launcher is not None:
            # Otherwise they would wait for this rank, and then print their own errors below its error.
            atexit.register(launcher.kill, signal.SIGKILL)

    def goodput(self) -> float | None:
        """Return the share of training steps in the time since the run was submitted; None if it is unknown.

        Steps that were repeated after a failure count once.
        """
        self.clock.read()
        seconds = self.seconds_since_submission()
        return None if seconds is None else self.clock.counted_seconds / seconds

    def seconds_since_submission(self) -> float | None:
        """Return the time since the run was submitted; None if an earlier start's clock was ahead of this one's."""
        seconds = time.time() - self.submitted
        return seconds if seconds > self.clock.counted_seconds else None

    def state_dict(self) -> PlainValues:
        """Return the state to save: the seconds of the steps up to this checkpoint and of the last validation."""
        self.clock.read()
        return {"counted_seconds": self.clock.counted_seconds, "validation_seconds": self._validation_seconds}

    def load_state_dict(self, state_dict: PlainValues) -> None:
        """Restore the callback's state."""
        self.clock.counted_seconds = state_dict["counted_seconds"]
        self._validation_seconds = state_dict["validation_seconds"]

    def _reset(self) -> None:
        self._sums = None
        self._steps = self._target_tokens = self._padded_tokens = self._tokens = 0


def memory_bytes(device: torch.device) -> int:
    """Return this process's peak memory on a GPU, or its current memory on a CPU (0 if the system is not Linux)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return private_memory() if can_measure_peak() else 0


def _raise_if_diverged(step: int, skipped_in_a_row: int) -> None:
    """Raise InputError after too many consecutive skipped steps; all ranks count the same number."""
    if skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
        raise InputError(
            f"step {step}: the last {skipped_in_a_row} steps had no finite gradient and were skipped, so the weights "
            f"are those of step {step - skipped_in_a_row}; resume with trainer.precision 32-true, or start another "
            "run.folder with --init-from, a lower training.learning_rate_factor or training.gradient_clip_norm"
        )
