"""What happens beside training: checkpoints kept, validation scored, progress shown and logged."""

import atexit
import math
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from tqdm import tqdm

from data_module.batch import StepShare
from data_module.errors import InputError
from data_module.tokenizer import Tokenizer
from pipeline.checkpoint import standalone_part, step_checkpoints, step_path, write_whole
from pipeline.corpus_bleu import CorpusBleu
from pipeline.recipe import Recipe
from pipeline.whole_file import full_disk


class WholeCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoints, written under a temporary name and renamed."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Whole or not at all."""
        write_whole(checkpoint, Path(path))


class CheckpointKeeper(Callback):
    """Saves every so many steps or minutes and at the end, keeps the newest few and the best by validation BLEU."""

    def __init__(self, run: Path, recipe: Recipe, tokenizer: Tokenizer) -> None:
        self._run = run
        self._settings = recipe.run
        self._part = standalone_part(recipe.as_dict(), recipe.network, tokenizer)
        self._last_saved = time.monotonic()
        self.saved_step = 0
        """The last step whose checkpoint is there."""
        self._save_after_validation = False
        self.best_bleu = -1.0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Save when a step or a time interval is over."""
        every = self._settings.checkpoint_every_steps
        minutes = self._settings.checkpoint_every_minutes
        due = bool(every) and trainer.global_step % (every or 1) == 0
        if minutes is not None and not due and trainer.global_step % self._settings.log_every_steps == 0:
            # Clocks of ranks differ; rank 0's decides. Asking makes ranks wait, so not at every step.
            due = trainer.strategy.broadcast(time.monotonic() - self._last_saved >= 60 * minutes)
        # Saved before a validation of the same step, a resume would leave that validation out.
        self._save_after_validation = due and validation_is_due(trainer)
        if due and not self._save_after_validation:
            self.save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the best so far, and what waited for this validation."""
        bleu = trainer.callback_metrics.get("validation/bleu")
        if bleu is not None and not trainer.sanity_checking and float(bleu) > self.best_bleu:
            self.best_bleu = float(bleu)
            trainer.save_checkpoint(self._run / "checkpoints" / "best.ckpt", weights_only=False)
        if self._save_after_validation:
            self._save_after_validation = False
            self.save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The last step is always kept."""
        if trainer.global_step > self.saved_step:
            self.save(trainer)

    def save(self, trainer: Trainer) -> None:
        """Write this step's checkpoint and let go of the oldest."""
        for logger in trainer.loggers:
            logger.save()  # a run that goes on from here does not log again what came before
        trainer.save_checkpoint(step_path(self._run, trainer.global_step), weights_only=False)
        self._last_saved, self.saved_step = time.monotonic(), trainer.global_step
        if trainer.is_global_zero:
            for path in step_checkpoints(self._run)[: -self._settings.keep_last]:
                path.unlink(missing_ok=True)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """A checkpoint stands alone."""
        checkpoint["translation"] = self._part

    def state_dict(self) -> dict[str, Any]:
        """Carried over a resume."""
        return {"best_bleu": self.best_bleu}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What a run resumes from is saved already."""
        self.saved_step = trainer.global_step

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As `state_dict` gave it."""
        self.best_bleu = state_dict["best_bleu"]


class MovingAverage(EMAWeightAveraging):
    """Lightning's moving average of the weights: it is what is validated and what a checkpoint gives to translate."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the weights alone: the last checkpoint has both, so that a run can go on from it."""


def validation_is_due(trainer: Trainer) -> bool:
    """Whether Lightning validates after the step that has just been taken."""
    every = trainer.val_check_interval
    return trainer.enable_validation and isinstance(every, int) and trainer.global_step % every == 0


class ValidationText(Callback):
    """Validation BLEU against the references as they were written, and translations to read."""

    def __init__(self, sources: list[str], references: list[str], tokenizer: Tokenizer, samples: int = 8) -> None:
        self._sources, self._references, self._tokenizer = sources, references, tokenizer
        self._bleu = CorpusBleu()
        self._samples = samples
        self._translations: dict[int, str] = {}

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin anew."""
        self._bleu = CorpusBleu().to(pl_module.device)
        self._translations = {}

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: StepShare,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Back to text, and counted."""
        if batch.weightless:
            return
        pairs, tokens, lengths = (tensor.tolist() for tensor in outputs)
        ids = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
        texts = self._tokenizer.decode(ids)
        self._bleu.update(texts, [self._references[pair] for pair in pairs])
        self._translations.update((pair, text) for pair, text in zip(pairs, texts, strict=True) if pair < self._samples)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the score on all ranks and rank 0's samples."""
        pl_module.log("validation/bleu", self._bleu.compute().to(pl_module.device))
        if trainer.is_global_zero and trainer.logger is not None and not trainer.sanity_checking:
            rows = [
                f"| {_cell(self._sources[pair])} | {_cell(self._references[pair])} | {_cell(text)} |"
                for pair, text in sorted(self._translations.items())
            ]
            table = "\n".join(["| source | reference | translation |", "| --- | --- | --- |", *rows])
            trainer.logger.experiment.add_text("validation/translations", table, trainer.global_step)  # type: ignore[attr-defined]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


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
