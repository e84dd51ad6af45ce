"""Ranks that stop together: they agree on a signal, save one checkpoint, and name the rank that has failed.

After every step, and after every validation batch, each rank posts whether it was asked to stop, on a group of the
CPU's own, and reads what all had posted one step earlier. That reduction has had a whole step to travel: nobody waits
for it, no device is synchronised, and since all ranks read the same one they stop after the same step, however far
apart the signal found them.
"""

import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from pipeline.checkpointing.callback import CheckpointCallback, validation_is_due
from pipeline.checkpointing.checkpoint import read_checkpoint
from pipeline.runtime import signals as stop_request
from pipeline.runtime.signals import Stopped
from pipeline.runtime.slurm import clear_failure_count
from pipeline.training.failure_report import FailureReport

MARGIN_SECONDS = 30
"""How much later than this group the gradients' group gives up, so that an error comes up where it can be told."""


def validation_is_pending(checkpoint: Path) -> bool:
    """Whether the run was stopped in the validation after the checkpoint's step, which is to be done again."""
    states = read_checkpoint(checkpoint).get("callbacks", {})
    return bool(states.get("Together", {}).get("validation_pending"))


def disable_lightning_signals(trainer: Trainer) -> None:
    """Keep Lightning's hands off SIGTERM.

    Its handler talks to other ranks from inside the signal, which deadlocks when they are elsewhere; and at each step
    it asks all of them about the signal and waits for the device.
    """
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


class StopConsensus:
    """Whether any rank was asked to stop, told to all of them alike."""

    def __init__(self, timeout_seconds: int) -> None:
        self._group: Any = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        self._posted: tuple[torch.Tensor, dist.Work] | None = None

    def asked(self, time_is_up: bool = False) -> bool:
        """What all ranks had posted at the last call, a signal or that; all must call it equally often."""
        wanted = time_is_up or stop_request.first_signal() is not None
        if self._group is None:
            return wanted
        answer = self._read()
        if not answer:
            flag = torch.tensor([wanted], dtype=torch.uint8)
            work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
            assert work is not None
            self._posted = flag, work
        return answer

    def asked_now(self) -> bool:
        """The same without the delay: ranks wait for one another."""
        return self.asked() or self.asked()

    def _read(self) -> bool:
        if self._posted is None:
            return False
        flag, work = self._posted
        self._posted = None
        work.wait()
        return bool(flag.item())


class GracefulStop(Callback):
    """Saves and raises Stopped on all ranks after the same step. Stands last, behind the keeper."""

    @property
    def state_key(self) -> str:
        """Key of the state in checkpoints: the class name in version 0.1.0."""
        return "Together"

    def __init__(self, keeper: CheckpointCallback, timeout_seconds: int, max_seconds: float | None = None) -> None:
        """Ranks wait `timeout_seconds` for one another; stop after `max_seconds` of training, as if asked to."""
        self._keeper = keeper
        self._timeout_seconds = timeout_seconds
        self._max_seconds = max_seconds
        self._began = 0.0
        self._agreement: StopConsensus | None = None
        self._roll: FailureReport | None = None
        self._validation_pending = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Meet."""
        self._agreement = StopConsensus(self._timeout_seconds)
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._roll = FailureReport()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Heed what came during start-up, and do the validation that the run was stopped in."""
        assert self._agreement is not None
        if self._agreement.asked_now():
            raise Stopped("asked to stop during start-up; nothing was lost, the same command goes on")
        if self._roll is not None:
            self._roll.compare(trainer.global_step)
        if trainer.is_global_zero:
            clear_failure_count()
        self._began = time.monotonic()
        if self._validation_pending:
            loop = trainer.fit_loop.epoch_loop.val_loop
            loop.restarting = False  # from its first batch on, since sums are not saved
            trainer.validating = True
            loop.run()
            trainer.training = True
            self._validation_pending = False

    def _time_is_up(self) -> bool:
        return self._max_seconds is not None and time.monotonic() - self._began >= self._max_seconds

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Between two steps."""
        assert self._agreement is not None
        if self._agreement.asked(self._time_is_up()):
            self._stop(trainer, validation_pending=validation_is_due(trainer))

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Between two validation batches, of which all ranks have equally many."""
        assert self._agreement is not None
        if self._agreement.asked():
            self._stop(trainer, validation_pending=True)

    def _stop(self, trainer: Trainer, validation_pending: bool) -> None:
        if trainer.global_step >= trainer.max_steps:
            return  # nothing is left but to end; stopped here, a run would count as finished without its last score
        self._validation_pending = validation_pending
        if validation_pending or self._keeper.saved_step < trainer.global_step:
            self._keeper.save(trainer, stopping=True)
        only_time = self._time_is_up() and stop_request.first_signal() is None
        why = "trainer.max_time is over" if only_time else "asked to stop"
        raise Stopped(f"{why}: saved after step {trainer.global_step}; the same command goes on from there")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Say at the end of the error where it came from."""
        if self._roll is not None and not isinstance(exception, Stopped | KeyboardInterrupt):
            exception.add_note(f"step {trainer.global_step}: {self._roll.call(exception)}")
        if self._roll is not None:
            # Whatever waits without limit for a rank that is silent: this one ends, so that the job can.
            code = exception.exit_code if isinstance(exception, Stopped) else 1
            end = threading.Timer(MARGIN_SECONDS, os._exit, [code])
            end.daemon = True
            end.start()

    def state_dict(self) -> dict[str, Any]:
        """Carried over a resume."""
        return {"validation_pending": self._validation_pending}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As `state_dict` gave it."""
        self._validation_pending = state_dict["validation_pending"]
