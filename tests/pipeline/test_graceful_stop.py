"""Ranks stop after the same step if one of them gets a signal, and all name the rank that failed."""

import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch.utils.data import DataLoader

from data_module.system.files import PlainValues
from data_module.tokenization.tokenizer import Tokenizer
from pipeline.checkpointing import checkpoint_io
from pipeline.checkpointing.callback import CheckpointCallback
from pipeline.checkpointing.checkpoint import write_atomic
from pipeline.checkpointing.checkpoint_io import AtomicCheckpointIO
from pipeline.checkpointing.run_folder import step_checkpoints, step_of
from pipeline.config.recipe import load_recipe
from pipeline.runtime import signals
from pipeline.runtime.console import RendezvousError, quiet_lightning
from pipeline.runtime.lightning_private import disable_signal_handling
from pipeline.runtime.signals import Stopped
from pipeline.runtime.step_clock import StepClock
from pipeline.training import graceful_stop
from pipeline.training.graceful_stop import FailureReport, GracefulStop, StopConsensus, rank_failures_in_one_line
from tests.conftest import ALONE, ROOT

SERVER = multiprocessing.get_context("forkserver")
"""Starts ranks from a process in which no test has run: after a backward pass, a fork could not run another one."""
SERVER.set_forkserver_preload([__name__])
TIMEOUT_SECONDS = 60
FOUND_AT_END: list[str] = []
"""The checkpoints that exist when training ends on this rank."""

pytestmark = pytest.mark.filterwarnings("ignore:.*dataloader is not resumable.*")


@dataclass(frozen=True)
class Event:
    """A signal that a rank gets in a step (0: before the first) or in the validation after it, or another event."""

    step: int
    in_validation: bool = False
    is_failure: bool = False
    """Instead of a signal, the rank raises an error."""
    misses_newest: bool = False
    """Instead of a signal, the rank resumes from the second newest checkpoint."""


class OneWeight(LightningModule):
    """A module that triggers an event; `validated` holds the number of validation batches by step."""

    def __init__(self, event: Event | None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.event = event
        self.validated: dict[int, int] = {}
        self.num_batches = 0

    def trigger_event(self, step: int, in_validation: bool = False) -> None:
        if self.event is None or (self.event.step, self.event.in_validation) != (step, in_validation):
            return
        if self.event.misses_newest:
            return
        if self.event.is_failure:
            raise ArithmeticError("a bug of this step")
        os.kill(os.getpid(), signal.SIGUSR1)

    def on_fit_start(self) -> None:
        self.trigger_event(0)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        assert self.trainer.training
        self.trigger_event(self.global_step + 1)
        return -self.weight

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.num_batches += 1
        if batch_idx == 1:
            self.trigger_event(self.global_step, in_validation=True)

    def on_validation_epoch_end(self) -> None:
        assert self.trainer.validating  # Lightning's logging depends on it
        self.validated[self.global_step] = self.num_batches

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def make_checkpoints(folder: Path, tokenizer: Path) -> CheckpointCallback:
    recipe = load_recipe([ROOT / "configs" / "demo.yaml"], ["--run.checkpoint_every_steps", "1000"])
    return CheckpointCallback(folder, recipe, Tokenizer.load(tokenizer), StepClock())


def make_callback(folder: Path, tokenizer: Path) -> tuple[GracefulStop, Trainer, OneWeight]:
    callback = GracefulStop(make_checkpoints(folder, tokenizer), TIMEOUT_SECONDS)
    return callback, Trainer(logger=False, plugins=[AtomicCheckpointIO()]), OneWeight(None)


def train(folder: Path, tokenizer: Path, event: Event | None, max_steps: int, max_seconds: float | None) -> str:
    """Train from the newest checkpoint, if any; return how training ended and which validations ran."""
    signals.install()
    quiet_lightning()
    checkpoints = make_checkpoints(folder, tokenizer)
    module = OneWeight(event)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=max_steps,
        max_epochs=-1,
        val_check_interval=4,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        callbacks=[checkpoints, GracefulStop(checkpoints, TIMEOUT_SECONDS, max_seconds)],
        plugins=[AtomicCheckpointIO(), LightningEnvironment()],
        **ALONE,
    )
    disable_signal_handling(trainer)
    found = step_checkpoints(folder)
    newest = found[:-1][-1:] if event is not None and event.misses_newest else found[-1:]
    data = DataLoader(torch.zeros(5)), DataLoader(torch.zeros(6))
    try:
        trainer.fit(module, *data, ckpt_path=newest[0] if newest else None)
        end = f"ended at step {trainer.global_step}"
    except signals.Stopped as stop:
        end = f"{stop} (exit code {stop.exit_code})"
    except Exception as error:
        return "\n".join([str(error), *error.__notes__])
    FOUND_AT_END.extend(path.name for path in step_checkpoints(folder))
    dist.barrier()
    return f"{end}, validated {module.validated}"


RankFunction = Callable[..., str]
Arguments = tuple[object, ...]


def run_rank(
    rank: int, size: int, folder: Path, environment: dict[str, str], function: RankFunction, arguments: Arguments
) -> None:
    """Run a function as one rank, in a process of its own, and write its result to a file."""
    os.environ |= environment | {"LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "SLURMD_NODENAME": f"node-{rank}"}
    store = dist.FileStore(str(folder / "store"), size)
    timeout = timedelta(seconds=TIMEOUT_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    (folder / f"rank-{rank}").write_text(function(*arguments))
    os._exit(0)


def exit_codes(folder: Path, function: RankFunction, *arguments: Arguments) -> list[int | None]:
    """Run a function on one rank per tuple of arguments; return the exit codes."""
    (folder / "store").unlink(missing_ok=True)
    size = len(arguments)
    processes = [
        SERVER.Process(target=run_rank, args=(rank, size, folder, dict(os.environ), function, rank_arguments))
        for rank, rank_arguments in enumerate(arguments)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def results(folder: Path, function: RankFunction, *arguments: Arguments) -> list[str]:
    """Run a function on one rank per tuple of arguments; return the results."""
    assert exit_codes(folder, function, *arguments) == [0] * len(arguments)
    return [(folder / f"rank-{rank}").read_text() for rank in range(len(arguments))]


def validation_is_pending(checkpoint: Path) -> bool:
    return torch.load(checkpoint, weights_only=True)["callbacks"]["GracefulStop"]["validation_pending"]


def train_on_ranks(
    folder: Path, corpus: Path, *events: Event | None, max_steps: int = 20, max_seconds: float | None = None
) -> list[str]:
    """Train on one rank per event; return how training ended on each rank."""
    tokenizer = corpus / "tokenizer.model"
    return results(folder, train, *((folder, tokenizer, event, max_steps, max_seconds) for event in events))


def train_on_slow_disk(folder: Path, tokenizer: Path, event: Event | None, max_steps: int) -> str:
    """Train with writes that take a second; return what `train` returns, and the checkpoints that exist at its end."""

    def write(contents: PlainValues, path: Path) -> None:
        time.sleep(1)
        write_atomic(contents, path)

    checkpoint_io.write_atomic = write
    return f"{train(folder, tokenizer, event, max_steps, None)}; {FOUND_AT_END}"


@pytest.mark.parametrize(("event", "max_steps", "step"), [(Event(2), 20, 3), (None, 3, 3)])
def test_all_ranks_wait_for_the_write_of_rank_0(
    tiny_corpus: Path, tmp_path: Path, event: Event | None, max_steps: int, step: int
) -> None:
    """At a stop and at the end: when one rank ends, the others are ended some seconds later."""
    shared = tmp_path, tiny_corpus / "tokenizer.model"
    ends = results(tmp_path, train_on_slow_disk, (*shared, event, max_steps), (*shared, None, max_steps))
    assert ends[0] == ends[1]
    assert ends[0].endswith(f"; ['step={step:08d}.ckpt']")
    assert ("asked to stop" in ends[0]) == (event is not None)


@pytest.fixture
def failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which the job's script counts starts without a new checkpoint."""
    path = tmp_path / "failures"
    path.touch()
    monkeypatch.setenv("FAILURES_FILE", str(path))
    return path


def test_both_stop_after_the_same_step(tiny_corpus: Path, tmp_path: Path, failures: Path) -> None:
    """Both stop at the end of the step after the one in which a rank got the signal."""
    stopped = "asked to stop: saved after step 4; run the same command to resume (exit code 75), validated {}"
    assert train_on_ranks(tmp_path, tiny_corpus, None, Event(3), max_seconds=600.0) == [stopped] * 2
    assert not failures.exists()  # removed with a new checkpoint
    failures.touch()
    [fourth] = step_checkpoints(tmp_path)
    assert step_of(fourth) == 4
    # The validation of that step is pending. After a signal in it, both ranks stop in it, and it is repeated in full.
    assert validation_is_pending(fourth)
    event = Event(4, in_validation=True)
    assert train_on_ranks(tmp_path, tiny_corpus, event, None, max_seconds=600.0) == [stopped] * 2
    assert step_checkpoints(tmp_path) == [fourth]
    assert validation_is_pending(fourth)
    assert failures.exists()  # no step was taken
    # In the last step, a signal has no effect.
    contents = fourth.read_bytes()
    ends = train_on_ranks(tmp_path, tiny_corpus, None, Event(5), max_steps=6)
    assert ends == ["ended at step 6, validated {4: 6}"] * 2
    [sixth] = step_checkpoints(tmp_path)  # the checkpoint of the stop was removed
    assert not validation_is_pending(sixth)
    # If one rank missed the newest checkpoint, none resumes.
    fourth.write_bytes(contents)
    message = "rank 0 on node-0 resumed from step 6, rank 1 on node-1 from 4: another job was still writing"
    for end in train_on_ranks(tmp_path, tiny_corpus, None, Event(0, misses_newest=True)):
        assert end.startswith(message)


@pytest.mark.parametrize(
    ("event", "max_seconds", "said", "saved"),
    [
        # The validation is pending then.
        (Event(4, in_validation=True), None, ["asked to stop: saved after step 4; "] * 2, [(4, True)]),
        # A rank that got a signal does not name max_time.
        (Event(2), 0.0, ["trainer.max_time has passed: saved after", "asked to stop: saved after"], [(2, False)]),
        (Event(0), None, ["asked to stop during start-up; nothing was lost"] * 2, []),
    ],
    ids=["in the first validation", "at max_time", "before the first step"],
)
def test_both_stop(
    tiny_corpus: Path,
    tmp_path: Path,
    failures: Path,
    event: Event,
    max_seconds: float | None,
    said: list[str],
    saved: list[tuple[int, bool]],
) -> None:
    ends = train_on_ranks(tmp_path, tiny_corpus, None, event, max_seconds=max_seconds)
    assert all(end.startswith(words) for end, words in zip(ends, said, strict=True)), ends
    assert [(step_of(path), validation_is_pending(path)) for path in step_checkpoints(tmp_path)] == saved
    assert failures.exists() == (not saved)


def test_the_rank_that_failed_is_named_by_both(tiny_corpus: Path, tmp_path: Path) -> None:
    waiting, failed = train_on_ranks(tmp_path, tiny_corpus, None, Event(3, is_failure=True))
    assert waiting.splitlines()[-1] == "step 2: rank 1 on node-1 failed: ArithmeticError: a bug of this step"
    assert failed == "a bug of this step\nstep 2: rank 1 on node-1 failed"


CONNECTION_LOST = RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")
"""What a rank gets when another rank ends."""


class Clock:
    """A clock that advances only in `sleep`; the first sleep calls `during_sleep`."""

    def __init__(self, during_sleep: Callable[[], object] = lambda: None) -> None:
        self.now = 0.0
        self._during_sleep = during_sleep
        time.monotonic, time.sleep = (lambda: self.now), self.sleep

    def sleep(self, seconds: float) -> None:
        if not self.now:
            self._during_sleep()
        self.now += seconds


def name_the_failed_rank(rank: int) -> str:
    """Describe errors on rank 0 before, and on rank 2 after rank 1 has reported its failure."""
    graceful_stop.ANSWER_SECONDS = TIMEOUT_SECONDS
    report = FailureReport()

    def let_rank_1_fail() -> None:
        dist.barrier()
        dist.barrier()

    clock = Clock(let_rank_1_fail)
    messages = []
    if rank == 0:
        messages.append(report.describe(CONNECTION_LOST))
    else:
        dist.barrier()
        if rank == 1:
            messages.append(report.describe(ArithmeticError("1 | 0\nis no number")))
        dist.barrier()
    if rank == 2:
        aborted, exited = RuntimeError("NCCL communicator was aborted"), dist.DistBackendError("remote process exited")
        messages += {report.describe(error) for error in (CONNECTION_LOST, aborted, exited)}
    dist.barrier()
    if rank == 1:
        messages.append(report.describe(AssertionError()))
    dist.barrier()
    if rank == 2:
        messages.append(report.describe(CONNECTION_LOST))
    dist.barrier()
    assert rank == 0 or clock.now == 0
    return "\n".join(messages)


def test_the_rank_that_failed_is_named_by_those_that_waited(tmp_path: Path) -> None:
    first, failed, later = results(tmp_path, name_the_failed_rank, (0,), (1,), (2,))
    assert first == "rank 1 on node-1 failed: ArithmeticError: 1 | 0"
    assert failed == "rank 1 on node-1 failed\nrank 1 on node-1 failed"
    assert later == f"{first}\nrank 1 on node-1 failed: AssertionError: "


def name_silent_ranks(rank: int) -> str:
    """Describe an error on one rank after another, with a timeout that is long enough for all reports."""
    graceful_stop.ANSWER_SECONDS = 50.0
    report = FailureReport()
    Clock(lambda: threading.Event().wait(0.1))
    message = ""
    for turn in (2, 0, 1):
        if rank == turn:
            message = report.describe(CONNECTION_LOST)
        dist.barrier()
    return message


def test_silent_ranks_are_named(tmp_path: Path) -> None:
    assert results(tmp_path, name_silent_ranks, (0,), (1,), (2,)) == [
        "rank 1 on node-1 has died or hangs; rank 0 on node-0 waited for it",
        "no rank has died or hangs; rank 1 on node-1 waited for it",
        "rank 0 on node-0, rank 1 on node-1 has died or hangs; rank 2 on node-2 waited for it",
    ]


def get_an_error(folder: Path, tokenizer: Path, message: str, seconds: float = 0.0) -> str:
    """Get an error after the clock has moved on by so many seconds; return its note, and how the program reports it."""
    graceful_stop.ANSWER_SECONDS = TIMEOUT_SECONDS
    now = 1000.0
    time.monotonic = lambda: now
    callback, trainer, module = make_callback(folder, tokenizer)
    callback.on_fit_start(trainer, module)
    callback.on_train_start(trainer, module)
    now += seconds
    try:
        with rank_failures_in_one_line():
            try:
                raise RuntimeError(message)
            except RuntimeError as error:
                callback.on_exception(trainer, module, error)
                raise
    except (RuntimeError, RendezvousError) as error:
        dist.barrier()
        return f"{type(error).__name__}: {error}{getattr(error, '__notes__', '')}"


@pytest.mark.parametrize("seconds", [TIMEOUT_SECONDS + 30, TIMEOUT_SECONDS / 3])
def test_a_rank_says_that_it_was_suspended(tiny_corpus: Path, tmp_path: Path, seconds: float) -> None:
    """In one line; a rank that was only slow does not."""
    arguments = tmp_path, tiny_corpus / "tokenizer.model", "[gloo] Timed out waiting for recv", seconds
    for rank, said in enumerate(results(tmp_path, get_an_error, arguments, arguments)):
        if seconds < TIMEOUT_SECONDS:
            assert said.startswith("RuntimeError: [gloo] Timed out waiting for recv['step 0: no rank has died or hangs")
        else:
            words = (
                rf"RendezvousError: step 0: rank {rank} on node-{rank} was suspended for 90 s, and run.timeout_seconds"
            )
            assert re.fullmatch(rf"{words} .*; run the same command to resume from the last checkpoint", said)


def test_the_failure_of_another_rank_is_one_line(tiny_corpus: Path, tmp_path: Path) -> None:
    arguments = tmp_path, tiny_corpus / "tokenizer.model"
    messages = "[gloo] Connection closed by peer", "a loader was killed"
    assert results(tmp_path, get_an_error, *((*arguments, message) for message in messages)) == [
        "RendezvousError: step 0: rank 1 on node-1 failed: RuntimeError: a loader was killed; run the same command to"
        " resume from the last checkpoint",
        "RuntimeError: a loader was killed['step 0: rank 1 on node-1 failed']",
    ]


def call_a_rank_that_hangs(rank: int) -> str:
    """Serve the key-value store as rank 0, which hangs, or wait for it as rank 1, which ends it afterwards."""
    own = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    first: list[int] = [os.getpid(), own.port if own else 0]
    dist.broadcast_object_list(first)
    dist.destroy_process_group()
    store = own or dist.TCPStore("127.0.0.1", first[1])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    report = FailureReport()
    dist.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        while "State:\tT" not in Path(f"/proc/{first[0]}/status").read_text():
            time.sleep(0.01)
        graceful_stop.ANSWER_SECONDS = 0.1
        message = report.describe(CONNECTION_LOST)
    finally:
        os.kill(first[0], signal.SIGKILL)
    # The thread that still queries the store does not keep the process alive.
    sys.exit(7 if message == "rank 0 on node-0 has died or hangs; rank 1 on node-1 waited for it" else message)


def test_rank_0_hangs_and_so_does_its_key_value_store(tmp_path: Path) -> None:
    assert exit_codes(tmp_path, call_a_rank_that_hangs, (0,), (1,)) == [-signal.SIGKILL, 7]


def agree_with_nobody(rank: int) -> str:
    """Make the group of stop flags on one rank only, as if the other one's address in the store led nowhere."""
    dist.distributed_c10d._get_default_store().set_timeout(timedelta(seconds=0.1))
    if rank == 1:
        return ""
    with pytest.raises(RendezvousError, match=r"^all ranks have met, but gloo does not connect them .*; export GLOO_"):
        StopConsensus(1)
    return ""


def test_a_group_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    results(tmp_path, agree_with_nobody, (0,), (1,))


def fail(folder: Path, tokenizer: Path, error: BaseException, margin_seconds: float, exit_code: int | None) -> str:
    """Let the callback handle an error, then hang or exit with a code."""
    graceful_stop.MARGIN_SECONDS = margin_seconds  # type: ignore[assignment]
    callback, trainer, module = make_callback(folder, tokenizer)
    callback.on_fit_start(trainer, module)
    dist.barrier()
    if isinstance(error, LookupError):
        graceful_stop.ANSWER_SECONDS = 0.1
        callback._failure_report._post = lambda report: threading.Event().wait()
    callback.on_exception(trainer, module, error)
    if exit_code is None:
        threading.Event().wait()
    sys.exit(exit_code)


def test_a_rank_that_hangs_after_an_error_is_terminated(tiny_corpus: Path, tmp_path: Path) -> None:
    """It ends with its error's exit code, also if it cannot report. A rank that does not hang ends by itself."""
    shared = tmp_path, tiny_corpus / "tokenizer.model"
    stopped, failed, silent = Stopped("asked to stop"), ArithmeticError("a bug of this step"), LookupError("no answer")
    ends = (stopped, 0, None), (failed, 0, None), (failed, 600, 7), (silent, 0, None)
    assert exit_codes(tmp_path, fail, *((*shared, *end) for end in ends)) == [75, 1, 7, 1]


def wait_in_cuda(folder: Path, tokenizer: Path, role: str) -> str:
    """Train a step, then wait in a call that stands for one of CUDA, which does not return.

    Args:
        folder: for checkpoints.
        tokenizer: of a corpus.
        role: "waits"; "dies" or "hangs" where the others wait for its part of the reduction; or "ends", if training
            ends after the step.
    """
    graceful_stop.MARGIN_SECONDS = graceful_stop.POLL_SECONDS = 0.1  # type: ignore[assignment]
    graceful_stop.ANSWER_SECONDS = TIMEOUT_SECONDS
    quiet_lightning()
    callback, trainer, module = make_callback(folder, tokenizer)
    sys.stderr = (folder / f"stderr-{os.environ['LOCAL_RANK']}").open("w")
    callback.on_fit_start(trainer, module)
    callback.on_train_start(trainer, module)
    callback._consensus._pending[1].wait()
    dist.barrier()
    others, pause, ready = dist.get_world_size() - 1, threading.Event().wait, f"ready-{os.environ['LOCAL_RANK']}"
    if role in ("dies", "hangs"):
        while len(list(folder.glob("ready-*"))) < others:
            pause(0.01)
        while role == "hangs" and sum(path.stat().st_size > 0 for path in folder.glob("stderr-*")) < others:
            pause(0.01)  # until the others have named it
        os.kill(os.getpid(), signal.SIGKILL)
    elif role == "waits":
        (folder / ready).touch()
        # Time goes on when both that wait have reported: only the third one is late.
        store = callback._failure_report._store
        Clock(lambda: store.wait(["report/0", "report/2"]))
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), callback._consensus._group)
        callback.on_train_batch_end(trainer, module)
    else:
        callback.on_train_batch_end(trainer, module)
        [pause] = [thread.join for thread in threading.enumerate() if "_end_if_stuck" in thread.name]
        callback.on_train_end(trainer, module)
        (folder / ready).touch()
    pause()
    return role


@pytest.mark.parametrize("role", ["dies", "hangs"])
def test_a_rank_that_waits_in_cuda_names_the_failed_one(tiny_corpus: Path, tmp_path: Path, role: str) -> None:
    shared = tmp_path, tiny_corpus / "tokenizer.model"
    codes = exit_codes(tmp_path, wait_in_cuda, (*shared, "waits"), (*shared, role), (*shared, "waits"))
    assert codes == [1, -signal.SIGKILL, 1]
    for rank in (0, 2):
        message = f"step 0: rank 1 on node-1 has died or hangs; rank {rank} on node-{rank} waited for it"
        assert (tmp_path / f"stderr-{rank}").read_text() == f"[rank{rank}]: {message}\n"


def test_a_rank_whose_training_has_ended_waits_for_no_other(tiny_corpus: Path, tmp_path: Path) -> None:
    shared = tmp_path, tiny_corpus / "tokenizer.model"
    assert exit_codes(tmp_path, wait_in_cuda, (*shared, "ends"), (*shared, "dies")) == [0, -signal.SIGKILL]
    assert (tmp_path / "stderr-0").read_text() == ""


def stop_and_fail_alone(folder: Path, tokenizer: Path) -> str:
    signals.install()
    callback, trainer, module = make_callback(folder, tokenizer)
    callback.on_fit_start(trainer, module)
    consensus = StopConsensus(TIMEOUT_SECONDS)
    answers = [consensus.should_stop()]
    os.kill(os.getpid(), signal.SIGUSR1)
    answers.append(consensus.should_stop())
    error = ArithmeticError("a bug of this step")
    num_threads = threading.active_count()
    callback.on_exception(trainer, module, error)
    return f"{answers}, {getattr(error, '__notes__', [])}, {threading.active_count() - num_threads}"


def test_a_single_rank_waits_for_no_other(tiny_corpus: Path, tmp_path: Path) -> None:
    """As one that torchrun has started: it stops immediately, adds no note to the error and starts no thread."""
    arguments = tmp_path, tiny_corpus / "tokenizer.model"
    assert results(tmp_path, stop_and_fail_alone, arguments) == ["[False, True], [], 0"]
