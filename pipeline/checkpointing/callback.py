"""When checkpoints are saved, and which of them are kept."""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import TorchCheckpointIO

from data_module.tokenization.tokenizer import Tokenizer
from pipeline.checkpointing.checkpoint import metadata, write_atomic
from pipeline.checkpointing.checkpoint_files import (
    around_best_checkpoints,
    around_best_path,
    checkpoint_bytes,
    max_checkpoints,
    nearest_steps,
    step_checkpoints,
    step_of,
    step_path,
)
from pipeline.config.recipe import Recipe
from pipeline.profiling.step_clock import StepClock
from pipeline.runtime.console import say


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write Lightning's checkpoints under a temporary name, then rename them."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Save the whole checkpoint, or leave nothing behind."""
        write_atomic(checkpoint, Path(path))


class CheckpointCallback(Callback):
    """Save a checkpoint at step or time intervals and at the end; keep the newest ones and the best by BLEU.

    As many checkpoints as the newest ones are also kept around the best validation, so that they can be averaged after
    the run has gone on without improving. They move to a folder of their own when they leave the newest.
    """

    def __init__(self, run: Path, recipe: Recipe, tokenizer: Tokenizer, clock: StepClock) -> None:
        self._run = run
        self._settings = recipe.run
        self._clock = clock
        self._with_average = recipe.training.ema_decay is not None
        self._metadata = metadata(recipe.as_dict(), recipe.network, tokenizer)
        self._last_saved = time.monotonic()
        self.saved_step = 0
        """Step of the newest checkpoint on disk."""
        self._save_after_validation = False
        self._temporary_step: int | None = None
        """Step of a checkpoint between two intervals, saved only because the run had to stop there."""
        self.best_bleu = -1.0
        self._best_step: int | None = None
        """Step of the best validation; None before the first one, and until the next best in runs before 0.3.0."""

    @property
    def state_key(self) -> str:
        """Key of the state in checkpoints: the class name in version 0.1.0."""
        return "CheckpointKeeper"

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Save when a step or time interval has passed."""
        every = self._settings.checkpoint_every_steps
        minutes = self._settings.checkpoint_every_minutes
        due = bool(every) and trainer.global_step % (every or 1) == 0
        if minutes is not None and not due and trainer.global_step % self._settings.log_every_steps == 0:
            # The clocks of ranks differ, so rank 0 decides. The broadcast makes ranks wait: not in every step.
            due = trainer.strategy.broadcast(time.monotonic() - self._last_saved >= 60 * minutes)
        # Resuming from a checkpoint saved before the step's validation would skip that validation.
        self._save_after_validation = due and validation_is_due(trainer)
        if due and not self._save_after_validation:
            self.save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save `best.ckpt` if BLEU improved, then the checkpoint that was waiting for this validation."""
        bleu = trainer.callback_metrics.get("validation/bleu")
        if bleu is not None and not trainer.sanity_checking and float(bleu) > self.best_bleu:
            self.best_bleu, self._best_step = float(bleu), trainer.global_step
            self._write(trainer, self._run / "checkpoints" / "best.ckpt")
        if self._save_after_validation:
            self._save_after_validation = False
            self.save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step."""
        if trainer.global_step > self.saved_step:
            self.save(trainer)

    def save(self, trainer: Trainer, stopping: bool = False) -> None:
        """Save this step's checkpoint and remove those that are neither among the newest nor around the best.

        With `stopping`, a checkpoint between two intervals is temporary: it is there to resume from, and the next one
        replaces it, so that the checkpoints left to average are as far apart as the recipe says.
        """
        # A run that is stopped again during the validation it resumed with may have resumed from a regular checkpoint.
        was_regular = self.saved_step == trainer.global_step and self._temporary_step != trainer.global_step
        previous, regular = self._temporary_step, not stopping or self._save_after_validation or was_regular
        self._temporary_step = None if regular else trainer.global_step
        self._write(trainer, step_path(self._run, trainer.global_step))
        self._last_saved, self.saved_step = time.monotonic(), trainer.global_step
        if trainer.is_global_zero:
            if previous is not None and previous != self.saved_step:
                step_path(self._run, previous).unlink(missing_ok=True)
            self._remove_old()

    def _remove_old(self) -> None:
        """Keep `run.keep_last` newest checkpoints, and as many nearest to the best validation.

        The latter are what they would be if no checkpoint had ever been removed: a new best step is among the newest
        checkpoints, and those that are saved later only replace others of the nearest.
        """
        # Newer checkpoints were damaged when the run resumed from this step: they do not count.
        newest = {step_of(path): path for path in step_checkpoints(self._run) if step_of(path) <= self.saved_step}
        around = {step_of(path): path for path in around_best_checkpoints(self._run)}
        near: list[int] = []
        if self._best_step is not None:
            # A temporary checkpoint will be replaced, so it must not take the place of one that lasts.
            steps = {step for step in (*newest, *around) if step <= self.saved_step} - {self._temporary_step}
            near = nearest_steps(steps, self._best_step, self._settings.keep_last)
        for step in sorted(newest)[: -self._settings.keep_last]:
            if step in near:
                target = around_best_path(self._run, step)
                target.parent.mkdir(exist_ok=True)
                with suppress(FileNotFoundError):
                    newest[step].replace(target)
            else:
                newest[step].unlink(missing_ok=True)
        for step, path in around.items():
            if step not in near:
                path.unlink(missing_ok=True)

    def _write(self, trainer: Trainer, path: Path) -> None:
        self._clock.begin("checkpoint")
        trainer.save_checkpoint(path, weights_only=False)
        self._clock.begin("between")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add what makes the checkpoint usable without the run folder."""
        checkpoint["translation"] = self._metadata

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run continues with."""
        return {"best_bleu": self.best_bleu, "best_step": self._best_step, "in_passing": self._temporary_step}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the step of the checkpoint that the run resumes from, and say how much disk the run needs."""
        self.saved_step = trainer.global_step
        size = checkpoint_bytes(sum(one.numel() for one in pl_module.parameters()), self._with_average) / 1e6
        files = max_checkpoints(self._settings.keep_last)
        folder = self._run / "checkpoints"
        say(f"checkpoints: at most {files} files of {size:,.1f} MB, {files * size:,.0f} MB in {folder}")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the callback's state."""
        self.best_bleu, self._temporary_step = state_dict["best_bleu"], state_dict.get("in_passing")
        self._best_step = state_dict.get("best_step")


def validation_is_due(trainer: Trainer) -> bool:
    """Return whether Lightning validates after the step that has just been taken."""
    every = trainer.val_check_interval
    return trainer.enable_validation and isinstance(every, int) and trainer.global_step % every == 0
