"""Checkpoints kept, and the moving average that they may hold."""

import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import TorchCheckpointIO

from data_module.tokenization.tokenizer import Tokenizer
from pipeline.checkpointing.checkpoint import metadata, step_checkpoints, step_of, step_path, write_atomic
from pipeline.config.recipe import Recipe
from pipeline.profiling.step_clock import StepClock


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoints, written under a temporary name and renamed."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Whole or not at all."""
        write_atomic(checkpoint, Path(path))


class CheckpointCallback(Callback):
    """Saves every so many steps or minutes and at the end, keeps the newest few and the best by validation BLEU."""

    @property
    def state_key(self) -> str:
        """Key of the state in checkpoints: the class name in version 0.1.0."""
        return "CheckpointKeeper"

    def __init__(self, run: Path, recipe: Recipe, tokenizer: Tokenizer, clock: StepClock) -> None:
        self._run = run
        self._settings = recipe.run
        self._clock = clock
        self._part = metadata(recipe.as_dict(), recipe.network, tokenizer)
        self._last_saved = time.monotonic()
        self.saved_step = 0
        """The last step whose checkpoint is there."""
        self._save_after_validation = False
        self._in_passing: int | None = None
        """The step of a checkpoint that was saved only since the run had to stop there."""
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
            self._write(trainer, self._run / "checkpoints" / "best.ckpt")
        if self._save_after_validation:
            self._save_after_validation = False
            self.save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The last step is always kept."""
        if trainer.global_step > self.saved_step:
            self.save(trainer)

    def save(self, trainer: Trainer, stopping: bool = False) -> None:
        """Write this step's checkpoint and let go of the oldest.

        One between two intervals, for a run that stops, is for going on from and no more: the next takes its place,
        so that those left to average are as far apart as the recipe says.
        """
        # Stopped again in the validation that it was resumed in, what it was resumed from may have been a regular one.
        was_regular = self.saved_step == trainer.global_step and self._in_passing != trainer.global_step
        before, regular = self._in_passing, not stopping or self._save_after_validation or was_regular
        self._in_passing = None if regular else trainer.global_step
        self._write(trainer, step_path(self._run, trainer.global_step))
        self._last_saved, self.saved_step = time.monotonic(), trainer.global_step
        if trainer.is_global_zero:
            if before is not None and before != self.saved_step:
                step_path(self._run, before).unlink(missing_ok=True)
            # Newer ones were not whole when the run went on from here; they are none of those it keeps.
            saved = [path for path in step_checkpoints(self._run) if step_of(path) <= self.saved_step]
            for path in saved[: -self._settings.keep_last]:
                path.unlink(missing_ok=True)

    def _write(self, trainer: Trainer, path: Path) -> None:
        self._clock.begin("checkpoint")
        trainer.save_checkpoint(path, weights_only=False)
        self._clock.begin("between")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """A checkpoint stands alone."""
        checkpoint["translation"] = self._part

    def state_dict(self) -> dict[str, Any]:
        """Carried over a resume."""
        return {"best_bleu": self.best_bleu, "in_passing": self._in_passing}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What a run resumes from is saved already."""
        self.saved_step = trainer.global_step

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As `state_dict` gave it."""
        self.best_bleu, self._in_passing = state_dict["best_bleu"], state_dict.get("in_passing")


def validation_is_due(trainer: Trainer) -> bool:
    """Whether Lightning validates after the step that has just been taken."""
    every = trainer.val_check_interval
    return trainer.enable_validation and isinstance(every, int) and trainer.global_step % every == 0
