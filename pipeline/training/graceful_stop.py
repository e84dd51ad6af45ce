"""Stop all ranks after the same step and save one checkpoint.

After every step and every validation batch each rank starts a reduction, in a CPU process group of its own, of the flag
"I was asked to stop", and reads the result of the reduction that it started one step earlier. That reduction has had a
whole step to complete, so no rank waits for it and no device is synchronized. All ranks read the same result and
therefore stop after the same step, wherever each of them was when the signal arrived.

If a rank fails, the errors of all other ranks name it and its node.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from data_module.system.files import PlainValues
from pipeline.checkpointing.callback import CheckpointCallback, validation_is_due
from pipeline.checkpointing.checkpoint_io import AtomicCheckpointIO, checkpoint_io
from pipeline.ranks.rank_messages import plain, post, read, silent_ranks, value_of_each_rank
from pipeline.ranks.rendezvous import GROUP_ERRORS, not_connected
from pipeline.runtime import signals
from pipeline.runtime.console import RendezvousError, report
from pipeline.runtime.launch import node_name
from pipeline.runtime.lightning_private import run_validation
from pipeline.runtime.signals import Stopped
from pipeline.runtime.torch_private import default_store

MARGIN_SECONDS = 30
"""How much longer the gradients' process group waits than this one, so that an error is raised here first."""
POLL_SECONDS = 1.0
"""How often a thread checks whether the ranks' reduction has failed."""
ANSWER_SECONDS = 5.0
"""How long a rank waits for the others to report that they have failed too; one that is late counts as dead. It has to
be well below SLURM's KillWait (30 s by default), after which the ranks left are killed."""

SUSPENDED_SECONDS = 10.0
"""A process whose clock jumps by less may only have been slow."""
_SUSPENDED, _NOBODY = "was suspended for", "no rank has died or hangs"


@contextmanager
def rank_failures_in_one_line() -> Iterator[None]:
    """Raise RendezvousError in place of a collective's error whose cause `GracefulStop` has noted.

    The cause is another rank, or that this process was suspended: SLURM and users do so by SIGSTOP, and all ranks then
    find that the others have been silent for too long. Where no cause is known, the traceback stays.
    """
    try:
        yield
    except RuntimeError as error:
        notes = getattr(error, "__notes__", ())
        if not notes or not is_collective_error(error) or f": {_NOBODY}" in notes[-1]:
            raise
        raise RendezvousError(f"{notes[-1]}; run the same command to resume from the last checkpoint") from None


class StopConsensus:
    """Agreement of all ranks on whether any of them was asked to stop."""

    def __init__(self, timeout_seconds: int) -> None:
        self._group: dist.ProcessGroup | None = None
        # A separate group on CPUs: a reduction in the gradients' group would wait for the gradients, and one of NCCL
        # would make the host wait for the GPU.
        if dist.is_initialized() and dist.get_world_size() > 1:
            try:
                self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
            except GROUP_ERRORS as error:
                raise not_connected("gloo", "", error) from None
        self._pending: tuple[torch.Tensor, dist.Work] | None = None

    def should_stop(self, time_is_up: bool = False) -> bool:
        """Return whether any rank wanted to stop at the previous call; start the next reduction.

        All ranks must call it equally often. Without other ranks the answer is immediate.
        """
        wanted = time_is_up or signals.first_signal() is not None
        if self._group is None:
            return wanted
        # Every rank reads the result of the same reduction, so either all stop at this call or none does. A rank that
        # followed its own flag would leave while the others begin a step, and they would wait for its gradients.
        answer = False
        if self._pending is not None:
            (flag, work), self._pending = self._pending, None
            work.wait()
            answer = bool(flag.item())
        if not answer:
            # No reduction is started after a stop: it would wait for ranks that have left.
            flag = torch.tensor([wanted], dtype=torch.uint8)
            work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
            assert work is not None
            self._pending = flag, work
        return answer

    def failure(self) -> RuntimeError | None:
        """Return the error of the pending reduction; None if it has none so far. It may be called from any thread."""
        pending = self._pending
        if pending is None or not pending[1].is_completed():
            return None
        try:
            pending[1].wait()
        except RuntimeError as error:
            return error
        return None


class FailureReport:
    """Names the rank that failed, and its node.

    Ranks report through the process group's key-value store, which rank 0 hosts: no other rank has to respond.
    """

    def __init__(self) -> None:
        self._rank = dist.get_rank()
        self._store = dist.PrefixStore("FailureReport", default_store())
        self._names = [f"rank {rank} on {node}" for rank, node in enumerate(plain(value_of_each_rank(node_name())))]
        self._keys = [f"report/{rank}" for rank in range(len(self._names))]

    def check_same_step(self, step: int) -> None:
        """Raise RuntimeError when ranks have resumed from different checkpoints; all ranks call it.

        Each rank looks for the newest checkpoint itself, and another job may have been saving one meanwhile.
        """
        steps = value_of_each_rank(step)
        others = [rank for rank, theirs in enumerate(steps) if theirs != steps[0]]
        if others:
            raise RuntimeError(
                f"{self._names[0]} resumed from step {steps[0]}, {self._names[others[0]]} from {steps[others[0]]}: "
                "another job was still writing to the run folder; start again"
            )

    def describe(self, error: BaseException, suspended_seconds: float = 0.0) -> str:
        """Return which rank failed and where, as far as this rank knows; wait a few seconds for others' reports.

        `suspended_seconds` is for how long this process was suspended before the error; 0 if it was not.
        """
        here = self._names[self._rank]
        if not is_collective_error(error):
            first_line = str(error).splitlines()[:1]
            self._post(f"failed|{type(error).__name__}: {first_line[0] if first_line else ''}")
            return f"{here} failed"
        if suspended_seconds:
            suspended = f"{_SUSPENDED} {suspended_seconds:.0f} s"
            self._post(f"failed|it {suspended}")
            return f"{here} {suspended}, and run.timeout_seconds is how long ranks wait for one another"
        self._post("waiting|")
        reports = self._collect()
        if reports is None:
            return f"{self._names[0]} has died or hangs; {here} waited for it"
        for rank, given in reports.items():
            kind, _, message = given.partition("|")
            if kind == "failed":
                return f"{self._names[rank]} failed: {message}"
        silent = [name for rank, name in enumerate(self._names) if rank not in reports]
        missing = f"{', '.join(silent)} has died or hangs" if silent else _NOBODY
        return f"{missing}; {here} waited for it"

    def _post(self, message: str) -> None:
        self._store.set_timeout(timedelta(seconds=ANSWER_SECONDS))
        with suppress(RuntimeError, dist.DistError):  # Rank 0, which hosts the store, may have died.
            post(self._store, self._keys[self._rank], message)

    def _collect(self) -> dict[int, str] | None:
        """Return every rank's report so far; None if the store, and with it rank 0, does not answer."""
        answers: list[dict[int, str]] = []

        def ask() -> None:
            deadline = time.monotonic() + ANSWER_SECONDS
            with suppress(RuntimeError, RendezvousError):  # Without an answer, the caller reports that.
                while True:
                    silent = silent_ranks(self._store, self._keys)
                    heard = [rank for rank in range(len(self._keys)) if rank not in silent]
                    reports = {rank: str(read(self._store, self._keys[rank])) for rank in heard}
                    failed = any(given.startswith("failed") for given in reports.values())
                    if failed or not silent or time.monotonic() > deadline:
                        answers.append(reports)
                        return
                    time.sleep(0.1)

        # A call to a store that hangs, or whose connection was cut, never returns.
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(ANSWER_SECONDS + 3)
        return answers[0] if answers else None


def is_collective_error(error: BaseException) -> bool:
    """Return whether a collective failed, rather than this rank's own work."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower() or "nccl" in str(error).lower()


class GracefulStop(Callback):
    """Save a checkpoint and raise Stopped on all ranks after the same step.

    It has to be the last callback, so that its checkpoint includes the effects of all others.
    """

    _consensus: StopConsensus

    def __init__(self, checkpoints: CheckpointCallback, timeout_seconds: int, max_seconds: float | None = None) -> None:
        """Ranks wait `timeout_seconds` for one another; after `max_seconds`, training stops as after a signal."""
        self._checkpoints = checkpoints
        self._timeout_seconds = timeout_seconds
        self._max_seconds = max_seconds
        self._started = 0.0
        self._failure_report: FailureReport | None = None
        self._validation_pending = False
        self._has_ended = threading.Event()
        self._last_look = self._continued = self._jump = 0.0
        """Monotonic times: of the last look at the clock, of the last jump's end, and the jump itself."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Create the process group that ranks use to agree on stopping."""
        self._has_ended.clear()
        self._consensus = StopConsensus(self._timeout_seconds)
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._failure_report = FailureReport()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Handle stop signals received during start-up, then rerun the validation that an earlier stop interrupted."""
        # The second call reads the reduction that the first one has started, with the current flags of all ranks.
        if self._consensus.should_stop() or self._consensus.should_stop():
            raise Stopped("asked to stop during start-up; nothing was lost, run the same command to resume")
        if (failures := self._failure_report) is not None:
            failures.check_same_step(trainer.global_step)
            self._last_look = time.monotonic()
            threading.Thread(target=self._end_if_stuck, args=(trainer, failures), daemon=True).start()
        self._started = time.monotonic()
        if self._validation_pending:
            run_validation(trainer)
            self._validation_pending = False
            # Loader workers are forked next, and would keep the file that is being written open.
            self._checkpoints.wait(trainer)

    def _time_is_up(self) -> bool:
        return self._max_seconds is not None and time.monotonic() - self._started >= self._max_seconds

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        """Stop between two steps."""
        if self._consensus.should_stop(self._time_is_up()):
            self._stop(trainer, validation_pending=validation_is_due(trainer))

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        """Stop between two validation batches; all ranks have equally many."""
        if self._consensus.should_stop():
            self._stop(trainer, validation_pending=True)

    def _stop(self, trainer: Trainer, validation_pending: bool) -> None:
        if trainer.global_step >= trainer.max_steps:
            return  # The run is about to end. Stopped here, it would count as finished without the last validation.
        self._validation_pending = validation_pending
        # The step may be saved already, but without the flag that its validation is pending.
        if validation_pending or self._checkpoints.saved_step < trainer.global_step:
            self._checkpoints.save(trainer, stopping=True)
        self._checkpoints.wait(trainer)
        only_time = self._time_is_up() and signals.first_signal() is None
        reason = "trainer.max_time has passed" if only_time else "asked to stop"
        raise Stopped(f"{reason}: saved after step {trainer.global_step}; run the same command to resume")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop watching the other ranks: after the last save, each rank may end."""
        self._has_ended.set()

    def _end_if_stuck(self, trainer: Trainer, failures: FailureReport) -> None:
        """End this process if another rank has failed and the main thread does not notice.

        With NCCL, gradients are reduced on the GPU. If another rank dies or hangs, the reduction does not end, and the
        main thread waits in a call of CUDA that never returns. The reduction of the stop flags fails on the CPU.
        """
        while not self._ends_within(POLL_SECONDS):
            error = self._consensus.failure()
            if error is None:
                continue
            # The main thread usually fails as well, and then reports and ends by itself.
            if self._ends_within(MARGIN_SECONDS):
                return
            message = failures.describe(error, self._suspended_seconds())
            report(f"[rank{dist.get_rank()}]: step {trainer.global_step}: {message}")
            if self._has_ended.wait(MARGIN_SECONDS):  # PyTorch writes NCCL's flight recorder meanwhile
                return
            if trainer.strategy.launcher is not None:
                trainer.strategy.launcher.kill(signal.SIGKILL)  # the ranks that Lightning has launched
            _exit_after_write(checkpoint_io(trainer), 1)

    def _ends_within(self, seconds: float) -> bool:
        """Return whether training ends within so many seconds; look at the clock every `POLL_SECONDS` meanwhile."""
        for _ in range(max(1, round(seconds / POLL_SECONDS))):
            if self._has_ended.wait(POLL_SECONDS):
                return True
            self._suspended_seconds()
        return False

    def _suspended_seconds(self) -> float:
        """Return for how long this process was suspended until a minute ago or less; 0 if it was not."""
        now = time.monotonic()
        if self._last_look and now - self._last_look > max(SUSPENDED_SECONDS, self._timeout_seconds / 2):
            self._jump, self._continued = now - self._last_look, now
        self._last_look = now
        return self._jump if now - self._continued < 2 * MARGIN_SECONDS else 0.0

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Add a note to the error that names the failed rank, and make sure that this process ends."""
        self._has_ended.set()
        if self._failure_report is None:
            return
        # Threads may wait without limit for a rank that no longer answers. End this process, so that the job can end.
        code = exception.exit_code if isinstance(exception, Stopped) else 1
        if not isinstance(exception, Stopped | KeyboardInterrupt):
            # Another thread may wait for a store that does not answer, and then this one waits for that thread.
            _end_after(MARGIN_SECONDS + 3 * ANSWER_SECONDS, trainer, code)
            message = self._failure_report.describe(exception, self._suspended_seconds())
            exception.add_note(f"step {trainer.global_step}: {message}")
        _end_after(MARGIN_SECONDS, trainer, code)

    def state_dict(self) -> PlainValues:
        """Return the state that a resumed run continues with."""
        return {"validation_pending": self._validation_pending}

    def load_state_dict(self, state_dict: PlainValues) -> None:
        """Restore the callback's state."""
        self._validation_pending = state_dict["validation_pending"]


def _end_after(seconds: float, trainer: Trainer, code: int) -> None:
    """Let this process end after so many seconds, unless it has ended before."""
    end = threading.Timer(seconds, _exit_after_write, [checkpoint_io(trainer), code])
    end.daemon = True
    end.start()


def _exit_after_write(writer: AtomicCheckpointIO, code: int) -> None:
    """Wait for a checkpoint that is being written, and end the process."""
    writer.join()
    os._exit(code)
