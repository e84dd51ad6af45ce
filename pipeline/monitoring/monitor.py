"""Training's scalars and the progress bar."""

import atexit
import math
import signal
import sys
import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from tqdm import tqdm

from data_module.batch import StepShare
from data_module.errors import InputError
from pipeline.whole_file import full_disk

SKIPPED_AT_MOST = 20
"""So many steps in a row without a finite gradient are no accident."""


class Monitor(Callback):
    """Loss, learning rate, gradient norm and speed to TensorBoard and the progress bar, every so many steps.

    Sums stay on the device; they are read, over all ranks, at the interval only, and so is how many steps were skipped.
    """

    def __init__(self, every_steps: int) -> None:
        self._every = every_steps
        self._sums: Tensor | None = None
        self._tokens = 0
        self._since = 0.0
        self._bar: tqdm[Any] | None = None
        self._shown: dict[str, str] = {}
        self._paused = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the bar, from where the run stands."""
        self._restart()
        if trainer.is_global_zero:
            self._bar = tqdm(
                total=trainer.max_steps,
                initial=trainer.global_step,
                desc="training",
                unit="step",
                file=sys.stderr,
                # Where no terminal is, a line every half minute instead of a bar.
                mininterval=0.5 if sys.stderr.isatty() else 30.0,
                dynamic_ncols=True,
            )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: StepShare, batch_idx: int
    ) -> None:
        """Add up, and at the interval read and log."""
        sums = torch.stack([outputs[name] for name in ("smoothed", "likelihood", "correct", "tokens")])
        self._sums = sums if self._sums is None else self._sums + sums
        self._tokens += batch.num_target_tokens
        step = trainer.global_step
        if step % self._every == 0:
            total = trainer.strategy.reduce(self._sums, reduce_op="sum")
            # All that is read, at once: each reading waits for the device.
            numbers = torch.stack([*total, outputs["gradient_norm"], outputs["skipped"], outputs["skipped_in_a_row"]])
            smoothed, likelihood, correct, tokens, norm, skipped, in_a_row = numbers.tolist()
            _end_if_diverging(trainer.global_step, int(in_a_row))
            speed = self._tokens / (time.monotonic() - self._since)
            scalars = {
                "train/learning_rate": outputs["learning_rate"],
                "train/gradient_norm": norm,
                "train/skipped_steps": skipped,
                "train/target_tokens_per_second": speed,
                "train/epoch": batch.epoch + (batch.index + 1) / batch.num_batches,
            }
            self._shown |= {"lr": f"{outputs['learning_rate']:.2e}", "tokens/s": f"{speed:,.0f}"}
            if skipped:
                self._shown["skipped"] = f"{skipped:.0f}"
            if tokens:  # of every rank, which are equally many
                tokens /= trainer.world_size
                scalars |= {
                    "train/loss": smoothed / tokens,
                    "train/perplexity": math.exp(min(likelihood / tokens, 50.0)),
                    "train/accuracy": correct / tokens,
                }
                self._shown["loss"] = f"{smoothed / tokens:.3f}"
            if trainer.logger is not None:
                trainer.logger.log_metrics(scalars, step=step)
            if self._bar is not None:
                self._bar.set_postfix(self._shown, refresh=False)
            self._restart()
        if self._bar is not None:
            self._bar.update(1)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validation's time is not training's."""
        self._paused = time.monotonic()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the scores, and go on counting."""
        self._since += time.monotonic() - self._paused
        metrics = trainer.callback_metrics
        if "validation/bleu" in metrics and not trainer.sanity_checking:
            bleu, loss = float(metrics["validation/bleu"]), float(metrics["validation/loss"])
            self._shown["BLEU"] = f"{bleu:.2f}"
            self._say(
                f"step {trainer.global_step}: validation BLEU {bleu:.2f}, loss {loss:.4f}, "
                f"perplexity {float(metrics['validation/perplexity']):.3f}"
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the last word to the error itself."""
        if self._bar is not None:
            self._bar.close()
        if (full := full_disk(exception)) is not None and full.filename is None and trainer.logger is not None:
            full.filename = trainer.logger.log_dir  # TensorBoard does not say where
        launcher = trainer.strategy.launcher
        if launcher is not None:
            # The ranks that this one has started would wait for it, then say at length that it has gone.
            atexit.register(launcher.kill, signal.SIGKILL)

    def _restart(self) -> None:
        self._sums, self._tokens, self._since = None, 0, time.monotonic()

    @rank_zero_only
    def _say(self, message: str) -> None:
        tqdm.write(message, file=sys.stderr)


def _end_if_diverging(step: int, skipped_in_a_row: int) -> None:
    """Raises InputError when too many steps in a row had no finite gradient; every rank has counted the same."""
    if skipped_in_a_row >= SKIPPED_AT_MOST:
        raise InputError(
            f"step {step}: the last {skipped_in_a_row} steps had no finite gradient and were skipped, the weights are "
            f"those of step {step - skipped_in_a_row}; lower training.learning_rate_factor, set "
            "training.gradient_clip_norm or trainer.precision 32-true, and go on from the last checkpoint"
        )
