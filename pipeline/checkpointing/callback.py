"""When checkpoints are saved, which of them are kept, and the moving average of the weights that they hold."""

import math
import shutil
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from data_module.system.files import PlainValues
from data_module.tokenization.tokenizer import Tokenizer
from model.torch_private import copy_all
from pipeline.checkpointing.checkpoint import NO_IDENTITY, Identity, metadata
from pipeline.checkpointing.checkpoint_io import WriteOptions, checkpoint_io
from pipeline.checkpointing.run_folder import (
    around_best_path,
    best_path,
    checkpoint_bytes,
    max_checkpoints,
    nearest_steps,
    step_checkpoints,
    step_of,
    step_path,
)
from pipeline.config.recipe import Recipe
from pipeline.config.settings import validation_tag
from pipeline.runtime.console import say
from pipeline.runtime.launch import clear_failure_count
from pipeline.runtime.lightning_private import WeightAveragingBase
from pipeline.runtime.step_clock import StepClock

_COPY_SLACK = 1 << 20
"""Bytes of a checkpoint's tensors beside weights, moments and tokenizer: step counts, and the allocator's headers."""


class CheckpointCallback(Callback):
    """Save a checkpoint at step or time intervals and at the end; keep the newest ones and the best by `run.best_by`.

    The same number of checkpoints is also kept around the best validation, so that they can be averaged even after the
    run has continued without improving. They move to a folder of their own when newer ones take their place.

    Checkpoints are written in the background where the host has room for a copy (see `AtomicCheckpointIO`). No file is
    removed before those that replace it have their final names. The error of a write is raised after the next step, at
    the next checkpoint, at a stop or at the end, whichever comes first.
    """

    def __init__(
        self,
        run: Path,
        recipe: Recipe,
        tokenizer: Tokenizer,
        clock: StepClock,
        mode: Literal["max", "min"] = "max",
        identity: Identity = NO_IDENTITY,
    ) -> None:
        """`mode` tells whether the largest or the smallest score of `run.best_by` is the best."""
        self._run = run
        self._sign = 1.0 if mode == "max" else -1.0
        self._settings = recipe.run
        self._clock = clock
        self._with_average = recipe.training.ema_decay is not None
        self._metadata = metadata(recipe, tokenizer, identity)
        self._last_saved = time.monotonic()
        self._first_step = 0
        """Step that the run resumed from."""
        self.saved_step = 0
        """Step of the newest checkpoint, which may still be being written; see `wait`."""
        self._save_after_validation = False
        self._temporary_step: int | None = None
        """Step of a checkpoint between two intervals, saved only because the run had to stop there."""
        self.best_score: float | None = None
        self._best_step: int | None = None
        """Step of the best validation; None before the first one."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        """Save when a step or time interval has passed. Raises the error of an earlier write."""
        checkpoint_io(trainer).raise_error()
        every = self._settings.checkpoint_every_steps
        minutes = self._settings.checkpoint_every_minutes
        due = bool(every) and trainer.global_step % (every or 1) == 0
        if minutes is not None and not due and trainer.global_step % self._settings.log_every_steps == 0:
            # The clocks of ranks differ, so rank 0 decides. Ranks wait for the broadcast, so not every step has one.
            due = trainer.strategy.broadcast(time.monotonic() - self._last_saved >= 60 * minutes)
        # Resuming from a checkpoint saved before the step's validation would skip that validation.
        self._save_after_validation = due and validation_is_due(trainer)
        if due and not self._save_after_validation:
            self.save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save `best.ckpt` if `run.best_by` improved, then the checkpoint that was waiting for this validation."""
        score = float(trainer.callback_metrics.get(validation_tag(self._settings.best_by), math.nan))
        is_better = self.best_score is None or self._sign * score > self._sign * self.best_score
        if improved := math.isfinite(score) and is_better:
            self.best_score, self._best_step = score, trainer.global_step
        if self._save_after_validation:
            self._save_after_validation = False
            self.save(trainer, best=improved)
        elif improved:
            self._write(trainer, best_path(self._run), WriteOptions())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step; wait until it is on disk."""
        if trainer.global_step > self.saved_step:
            self.save(trainer)
        self.wait(trainer)

    def wait(self, trainer: Trainer) -> None:
        """Wait until the newest checkpoint is on disk; raise the error of its write. All ranks call it.

        Rank 0 writes. Another rank that ended meanwhile would end the whole run some seconds later.
        """
        self._clock.begin("checkpoint")
        checkpoint_io(trainer).wait()
        trainer.strategy.barrier("CheckpointCallback.wait")
        self._clock.begin("loop_overhead")

    def save(self, trainer: Trainer, stopping: bool = False, best: bool = False) -> None:
        """Save this step's checkpoint and remove those that are neither among the newest nor around the best.

        With `stopping`, a checkpoint between two intervals is temporary: it is for resuming only, and the next one
        replaces it, so that the checkpoints to average are as far apart as the recipe says. With `best`, `best.ckpt` is
        saved as well, from the same copy in memory.
        """
        step, previous = trainer.global_step, self._temporary_step
        # A run that is stopped again in the validation with which it resumed may have resumed from a regular one.
        was_regular = self.saved_step == step != previous
        self._temporary_step = step if stopping and not self._save_after_validation and not was_regular else None
        replaced = [previous] if previous not in (None, step) else []
        # The arguments are bound now, because training changes the state while the thread writes.
        remove = partial(self._remove_old, step, self._best_step, self._temporary_step, replaced)
        copies = (best_path(self._run),) if best else ()
        self._write(trainer, step_path(self._run, step), WriteOptions(copies, remove))
        self._last_saved, self.saved_step = time.monotonic(), step

    def _remove_old(self, saved: int, best: int | None, temporary: int | None, replaced: list[int]) -> None:
        """Keep `run.keep_last` newest checkpoints, and as many nearest to the best validation.

        The latter are the same as if no checkpoint had ever been removed: a new best step is among the newest
        checkpoints, and a later checkpoint can only replace one of the nearest.

        This runs in the thread that has written the checkpoint, and only if the write succeeded. If the process is
        killed before, surplus files are left, and the call after the next checkpoint removes them.

        `saved` is the step of the checkpoint; `temporary` is the same if the checkpoint is temporary, else None; `best`
        is the step of the best validation so far; `replaced` are the steps of temporary checkpoints that it replaces.
        """
        if saved > self._first_step:
            clear_failure_count()
        for step in replaced:
            step_path(self._run, step).unlink(missing_ok=True)
        # Checkpoints newer than this one were damaged when the run resumed, and do not count.
        newest = {step_of(path): path for path in step_checkpoints(self._run) if step_of(path) <= saved}
        around = {step_of(path): path for path in step_checkpoints(self._run, around_best=True)}
        near: list[int] = []
        if best is not None:
            # A temporary checkpoint will be replaced, so it must not take the place of one that lasts.
            steps = {step for step in (*newest, *around) if step <= saved} - {temporary}
            near = nearest_steps(steps, best, self._settings.keep_last)
        for step in sorted(newest)[: -self._settings.keep_last]:
            if step in near:
                target = around_best_path(self._run, step)
                target.parent.mkdir(exist_ok=True)
                with suppress(FileNotFoundError):  # The user has removed it meanwhile.
                    shutil.move(newest[step], target)  # It may be on another disk.
            else:
                newest[step].unlink(missing_ok=True)
        for step, path in around.items():
            if step not in near:
                path.unlink(missing_ok=True)

    def _write(self, trainer: Trainer, path: Path, options: WriteOptions) -> None:
        self._clock.begin("checkpoint")
        trainer.save_checkpoint(path, weights_only=False, storage_options=options)
        self._clock.begin("loop_overhead")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: PlainValues) -> None:
        """Add the metadata that make the checkpoint usable without the run folder."""
        checkpoint["translation"] = self._metadata

    def state_dict(self) -> PlainValues:
        """Return the state that a resumed run continues with."""
        return {"best_score": self.best_score, "best_step": self._best_step, "temporary_step": self._temporary_step}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Plan the memory that checkpoints are copied to, which the measurement of training's memory then counts."""
        self._bytes = checkpoint_bytes(sum(one.nbytes for one in pl_module.parameters()), self._with_average)
        if trainer.is_global_zero:
            size = self._bytes + self._metadata["tokenizer"].nbytes + _COPY_SLACK
            checkpoint_io(trainer).copy.plan(size, trainer.num_devices)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the step that the run resumes from, and print how much disk and memory checkpoints need."""
        self._first_step = self.saved_step = trainer.global_step
        size, files = self._bytes / 1e6, max_checkpoints(self._settings.keep_last)
        place, how = self._run / "checkpoints", checkpoint_io(trainer).describe()
        say(f"checkpoints: at most {files} files of {size:,.1f} MB, {files * size:,.0f} MB in {place}; {how}")

    def load_state_dict(self, state_dict: PlainValues) -> None:
        """Restore the callback's state."""
        # The first runs of format 2, such as the one in tests, knew only BLEU, and stored it as `best_bleu`.
        self.best_score = state_dict.get("best_score", state_dict.get("best_bleu"))
        self._best_step = state_dict["best_step"]
        self._temporary_step = state_dict["temporary_step"]


def validation_is_due(trainer: Trainer) -> bool:
    """Return whether Lightning validates after the step that has just been taken."""
    every = trainer.val_check_interval
    return trainer.enable_validation and isinstance(every, int) and trainer.global_step % every == 0


class EMA(WeightAveragingBase):
    """Keep a moving average of the weights; validation and translation use the average.

    Lightning's own implementation keeps the average on the CPU, where the module still is during `setup`, and copies
    all weights there in every step. On a GPU the host would have to wait for that copy.
    """

    def __init__(self, decay: float) -> None:
        """After each step the average becomes `decay * average + (1 - decay) * weights`."""
        super().__init__()
        self._update = get_ema_multi_avg_fn(decay)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Create the average on the device and in the precision that the weights will have."""
        super().setup(trainer, pl_module, stage)
        trainer.precision_plugin.convert_module(self.average.module)

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        """Update the average; the first update copies the weights."""
        if trainer.global_step <= self._latest_update_step:
            return
        average: list[Tensor] = list(self.average.module.parameters())
        weights: list[Tensor] = list(pl_module.parameters())
        if self._latest_update_step == 0:
            copy_all(average, weights)
        else:
            self._update(average, weights, self.average.n_averaged)
        self.average.n_averaged += 1
        self._latest_update_step = trainer.global_step

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: PlainValues) -> None:
        """Save the average as `state_dict` and the weights as `current_model_state`, also during a validation."""
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        if self.swapped:
            average = checkpoint["current_model_state"]
            checkpoint["current_model_state"] = checkpoint["state_dict"]
            checkpoint["state_dict"] = average

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Do not replace the weights by the average: the last checkpoint holds both, so that the run can resume."""
