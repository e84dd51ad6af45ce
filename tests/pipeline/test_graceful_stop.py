"""Two ranks that train: where one is asked to stop both stop after the same step, and where one fails both name it."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch.utils.data import DataLoader

from data_module.tokenization.tokenizer import Tokenizer
from pipeline.checkpointing.callback import AtomicCheckpointIO, CheckpointCallback
from pipeline.checkpointing.checkpoint import read_checkpoint, step_checkpoints, step_of
from pipeline.compat.lightning import disable_signal_handling
from pipeline.config.recipe import load_recipe
from pipeline.profiling.step_clock import StepClock
from pipeline.runtime import signals
from pipeline.runtime.console import quiet_lightning
from pipeline.runtime.signals import Stopped
from pipeline.training import failure_report, graceful_stop
from pipeline.training.failure_report import FailureReport
from pipeline.training.graceful_stop import (
    GracefulStop,
    StopConsensus,
    validation_is_pending,
)
from tests.conftest import ROOT

FORK = multiprocessing.get_context("fork")
TIMEOUT_SECONDS = 60

pytestmark = pytest.mark.filterwarnings("ignore:.*dataloader is not resumable.*", "ignore:.*fork.*:DeprecationWarning")


@dataclass(frozen=True)
class Event:
    """A signal that a rank gets: in a step (0: before the first), or in the validation after it; or its failure."""

    step: int
    in_validation: bool = False
    is_failure: bool = False
    misses_newest: bool = False
    """Instead of a signal: the rank goes on from the newest checkpoint but one."""


class OneWeight(LightningModule):
    """A rank that something happens to; it notes how many batches it was validated on after which step."""

    def __init__(self, event: Event | None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.event = event
        self.validated: dict[int, int] = {}
        self.num_batches = 0

    def happens(self, step: int, in_validation: bool = False) -> None:
        if self.event is None or (self.event.step, self.event.in_validation) != (step, in_validation):
            return
        if self.event.misses_newest:
            return
        if self.event.is_failure:
            raise ArithmeticError("a bug of this step")
        os.kill(os.getpid(), signal.SIGUSR1)

    def on_fit_start(self) -> None:
        self.happens(0)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        assert self.trainer.training
        self.happens(self.global_step + 1)
        return -self.weight

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.num_batches += 1
        if batch_idx == 1:
            self.happens(self.global_step, in_validation=True)

    def on_validation_epoch_end(self) -> None:
        assert self.trainer.validating  # by which Lightning knows where a figure that is logged belongs
        self.validated[self.global_step] = self.num_batches

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def make_checkpoints(folder: Path, tokenizer: Path) -> CheckpointCallback:
    recipe = load_recipe([ROOT / "configs" / "demo.yaml"], ["--run.checkpoint_every_steps", "1000"])
    return CheckpointCallback(folder, recipe, Tokenizer.load(tokenizer), StepClock())


def train(folder: Path, tokenizer: Path, event: Event | None, max_steps: int, max_seconds: float | None) -> str:
    """Train from the newest checkpoint that is there; returns how it ended, and the validations done."""
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
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[checkpoints, GracefulStop(checkpoints, TIMEOUT_SECONDS, max_seconds)],
        plugins=[AtomicCheckpointIO(), LightningEnvironment()],
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
    dist.barrier()
    return f"{end}, validated {module.validated}"


Work = Callable[..., str]


def rank(number: int, size: int, folder: Path, work: Work, arguments: tuple[Any, ...]) -> None:
    """In a process of its own; leaves what the work returns in a file."""
    os.environ |= {"LOCAL_RANK": str(number), "WORLD_SIZE": str(size), "SLURMD_NODENAME": f"node-{number}"}
    store = dist.FileStore(str(folder / "store"), size)
    timeout = timedelta(seconds=TIMEOUT_SECONDS)
    dist.init_process_group("gloo", store=store, rank=number, world_size=size, timeout=timeout)
    (folder / f"rank-{number}").write_text(work(*arguments))
    os._exit(0)


def exit_codes(folder: Path, work: Work, *arguments: tuple[Any, ...]) -> list[int | None]:
    """Of ranks that do the work, each with its own arguments."""
    (folder / "store").unlink(missing_ok=True)
    size = len(arguments)
    ranks = [FORK.Process(target=rank, args=(number, size, folder, work, own)) for number, own in enumerate(arguments)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return [process.exitcode for process in ranks]


def results(folder: Path, work: Work, *arguments: tuple[Any, ...]) -> list[str]:
    """What the work returns on each rank, given its own arguments."""
    assert exit_codes(folder, work, *arguments) == [0] * len(arguments)
    return [(folder / f"rank-{number}").read_text() for number in range(len(arguments))]


def two_ranks(
    folder: Path,
    corpus: Path,
    *events: Event | None,
    max_steps: int = 20,
    max_seconds: float | None = None,
) -> list[str]:
    """How each rank ended, given what happens to each."""
    tokenizer = corpus / "tokenizer.model"
    return results(folder, train, *((folder, tokenizer, event, max_steps, max_seconds) for event in events))


@pytest.fixture
def failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which the job's script has counted a failure."""
    path = tmp_path / "failures"
    path.touch()
    monkeypatch.setenv("FAILURES_FILE", str(path))
    return path


def test_both_stop_after_the_same_step(tiny_corpus: Path, tmp_path: Path, failures: Path) -> None:
    """One is asked in a step; by the end of the next the other knows."""
    stopped = "asked to stop: saved after step 4; run the same command to continue (exit code 75), validated {}"
    assert two_ranks(tmp_path, tiny_corpus, None, Event(3), max_seconds=600.0) == [stopped] * 2
    assert not failures.exists()  # since training has begun
    [fourth] = step_checkpoints(tmp_path)
    assert step_of(fourth) == 4
    # That step's validation is still to be done; asked in it, both stop in it, and it is done again from its beginning.
    assert validation_is_pending(read_checkpoint(fourth))
    event = Event(4, in_validation=True)
    assert two_ranks(tmp_path, tiny_corpus, event, None, max_seconds=600.0) == [stopped] * 2
    assert step_checkpoints(tmp_path) == [fourth]
    assert validation_is_pending(read_checkpoint(fourth))
    # In the last step there is nothing to stop.
    contents = fourth.read_bytes()
    ends = two_ranks(tmp_path, tiny_corpus, None, Event(5), max_steps=6)
    assert ends == ["ended at step 6, validated {4: 6}"] * 2
    [sixth] = step_checkpoints(tmp_path)  # that of the stop has given way
    assert not validation_is_pending(read_checkpoint(sixth))
    # Where one rank has looked for the newest before it was there, none goes on.
    fourth.write_bytes(contents)
    said = "rank 0 on node-0 resumed from step 6, rank 1 on node-1 from 4: another job was still writing"
    for end in two_ranks(tmp_path, tiny_corpus, None, Event(0, misses_newest=True)):
        assert end.startswith(said)


def test_both_stop_in_the_first_validation(tiny_corpus: Path, tmp_path: Path) -> None:
    """Which is to be done when the run goes on."""
    for end in two_ranks(tmp_path, tiny_corpus, None, Event(4, in_validation=True)):
        assert end.startswith("asked to stop: saved after step 4; ")
    [fourth] = step_checkpoints(tmp_path)
    assert validation_is_pending(read_checkpoint(fourth))


def test_both_stop_before_the_first_step(tiny_corpus: Path, tmp_path: Path, failures: Path) -> None:
    ends = two_ranks(tmp_path, tiny_corpus, None, Event(0))
    assert ends[0] == ends[1]
    assert ends[0].startswith("asked to stop during start-up; nothing was lost")
    assert not step_checkpoints(tmp_path)
    assert failures.exists()


def test_both_stop_when_the_time_is_over(tiny_corpus: Path, tmp_path: Path) -> None:
    """And say so, but for one that was asked as well."""
    ends = two_ranks(tmp_path, tiny_corpus, None, Event(2), max_seconds=0.0)
    assert ends[0].startswith("trainer.max_time is over: saved after step 2; ")
    assert ends[1].startswith("asked to stop: saved after step 2; ")
    [second] = step_checkpoints(tmp_path)
    assert not validation_is_pending(read_checkpoint(second))


def test_the_rank_that_failed_is_named_by_both(tiny_corpus: Path, tmp_path: Path) -> None:
    waiting, failed = two_ranks(tmp_path, tiny_corpus, None, Event(3, is_failure=True))
    assert waiting.splitlines()[-1] == "step 2: rank 1 on node-1 failed: ArithmeticError: a bug of this step"
    assert failed == "a bug of this step\nstep 2: rank 1 on node-1 failed"


LOST = RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")
"""What a rank sees of another's end."""


class Clock:
    """Time passes in `sleep` only; what else happens meanwhile may be given."""

    def __init__(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.now = 0.0
        self._meanwhile = meanwhile
        time.monotonic, time.sleep = (lambda: self.now), self.sleep

    def sleep(self, seconds: float) -> None:
        if not self.now:
            self._meanwhile()
        self.now += seconds


def name_the_failed_rank(number: int) -> str:
    """Rank 0 has to wait for what rank 1 says; rank 2 comes when it is said."""
    report = FailureReport()

    def let_rank_1_fail() -> None:
        dist.barrier()
        dist.barrier()

    clock = Clock(let_rank_1_fail)
    said = []
    if number == 0:
        said.append(report.describe(LOST))
    else:
        dist.barrier()
        if number == 1:
            said.append(report.describe(ArithmeticError("1 | 0\nis no number")))
        dist.barrier()
    if number == 2:
        lost = (LOST, RuntimeError("NCCL communicator was aborted"), dist.DistBackendError("remote process exited"))
        said += {report.describe(error) for error in lost}
    dist.barrier()
    if number == 1:
        said.append(report.describe(AssertionError()))
    dist.barrier()
    if number == 2:
        said.append(report.describe(LOST))
    dist.barrier()
    assert number == 0 or clock.now == 0
    return "\n".join(said)


def test_the_rank_that_failed_is_named_by_those_that_waited(tmp_path: Path) -> None:
    first, failed, later = results(tmp_path, name_the_failed_rank, (0,), (1,), (2,))
    assert first == "rank 1 on node-1 failed: ArithmeticError: 1 | 0"
    assert failed == "rank 1 on node-1 failed\nrank 1 on node-1 failed"
    assert later == f"{first}\nrank 1 on node-1 failed: AssertionError: "


def name_silent_ranks(number: int) -> str:
    """Each in its turn; it waits for the others' words as long as it takes."""
    failure_report.ANSWER_SECONDS = 50.0
    report = FailureReport()
    Clock(lambda: threading.Event().wait(0.1))
    said = ""
    for turn in (2, 0, 1):
        if number == turn:
            said = report.describe(LOST)
        dist.barrier()
    return said


def test_silent_ranks_are_named(tmp_path: Path) -> None:
    assert results(tmp_path, name_silent_ranks, (0,), (1,), (2,)) == [
        "rank 1 on node-1 has died or hangs; rank 0 on node-0 waited for it",
        "no rank has died or hangs; rank 1 on node-1 waited for it",
        "rank 0 on node-0, rank 1 on node-1 has died or hangs; rank 2 on node-2 waited for it",
    ]


def compare_steps(step: int) -> str:
    report = FailureReport()
    report.check_same_step(4)
    with pytest.raises(RuntimeError) as raised:
        report.check_same_step(step)
    return str(raised.value)


def test_ranks_that_went_on_from_different_steps(tmp_path: Path) -> None:
    for said in results(tmp_path, compare_steps, (4,), (8,), (4,)):
        assert said.startswith("rank 0 on node-0 resumed from step 4, rank 1 on node-1 from 8: ")


def call_a_rank_that_hangs(number: int, port: Any, is_stopped: Any) -> None:
    """Rank 0, which has the key-value store, or the one that waits for it."""
    os.environ["SLURMD_NODENAME"] = f"node-{number}"
    if number == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port.send(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", port.recv())
    dist.init_process_group("gloo", store=store, rank=number, world_size=2)
    report = FailureReport()
    dist.barrier()
    if number == 0:
        is_stopped.send(True)
        threading.Event().wait()
    is_stopped.recv()
    failure_report.ANSWER_SECONDS = 0.1
    said = report.describe(LOST)
    # The thread that still asks does not keep the process alive.
    sys.exit(7 if said == "rank 0 on node-0 has died or hangs; rank 1 on node-1 waited for it" else said)


def test_rank_0_hangs_and_the_key_value_store_with_it() -> None:
    receive_port, send_port = FORK.Pipe(duplex=False)
    from_first, ready = FORK.Pipe(duplex=False)
    is_stopped, tell = FORK.Pipe(duplex=False)
    first = FORK.Process(target=call_a_rank_that_hangs, args=(0, send_port, ready))
    second = FORK.Process(target=call_a_rank_that_hangs, args=(1, receive_port, is_stopped))
    for process in (first, second):
        process.start()
    try:
        from_first.recv()
        assert first.pid is not None
        os.kill(first.pid, signal.SIGSTOP)
        os.waitpid(first.pid, os.WUNTRACED)
        tell.send(True)
        second.join()
        assert second.exitcode == 7
    finally:
        for process in (first, second):
            process.kill()
            process.join()


def wait_for_a_rank_that_hangs(number: int) -> str:
    report = FailureReport()
    consensus = StopConsensus(timeout_seconds=0.2)  # type: ignore[arg-type]
    said = ""
    if number == 0:
        assert not consensus.should_stop()
        with pytest.raises(RuntimeError, match=r"\b200 ?ms") as raised:
            consensus.should_stop()
        Clock()
        said = report.describe(raised.value)
    dist.barrier()
    return said


def test_ranks_wait_for_one_another_as_long_as_told(tmp_path: Path) -> None:
    said, _ = results(tmp_path, wait_for_a_rank_that_hangs, (0,), (1,))
    assert said == "rank 1 on node-1 has died or hangs; rank 0 on node-0 waited for it"


def fail(folder: Path, tokenizer: Path, error: BaseException, margin_seconds: float, exit_code: int | None) -> str:
    """Take part in a fit that ends with the error; then hang, or exit with a code."""
    graceful_stop.MARGIN_SECONDS = margin_seconds  # type: ignore[assignment]
    callback, trainer, module = (
        GracefulStop(make_checkpoints(folder, tokenizer), TIMEOUT_SECONDS),
        Trainer(logger=False),
        OneWeight(None),
    )
    callback.on_fit_start(trainer, module)
    dist.barrier()
    callback.on_exception(trainer, module, error)
    if exit_code is None:
        threading.Event().wait()
    sys.exit(exit_code)


def test_a_rank_that_hangs_after_an_error_is_ended(tiny_corpus: Path, tmp_path: Path) -> None:
    """With the exit code of its error; one that does not hang ends by itself."""
    shared = tmp_path, tiny_corpus / "tokenizer.model"
    stopped, failed = Stopped("asked to stop"), ArithmeticError("a bug of this step")
    codes = exit_codes(
        tmp_path, fail, (*shared, stopped, 0, None), (*shared, failed, 0, None), (*shared, failed, 30, 7)
    )
    assert codes == [75, 1, 7]


def take_part_alone(folder: Path, tokenizer: Path, is_grouped: bool) -> str:
    if not is_grouped:
        dist.destroy_process_group()
    signals.install()
    callback, trainer, module = (
        GracefulStop(make_checkpoints(folder, tokenizer), TIMEOUT_SECONDS),
        Trainer(logger=False),
        OneWeight(None),
    )
    callback.on_fit_start(trainer, module)
    consensus = StopConsensus(TIMEOUT_SECONDS)
    answers = [consensus.should_stop()]
    os.kill(os.getpid(), signal.SIGUSR1)
    answers.append(consensus.should_stop())
    error = ArithmeticError("a bug of this step")
    num_threads = threading.active_count()
    callback.on_exception(trainer, module, error)
    return f"{answers}, {getattr(error, '__notes__', [])}, {threading.active_count() - num_threads}"


@pytest.mark.parametrize("is_grouped", [False, True])
def test_a_single_rank_has_nobody_to_wait_for(tiny_corpus: Path, tmp_path: Path, is_grouped: bool) -> None:
    """It stops at once, names nobody and needs no help to end."""
    arguments = tmp_path, tiny_corpus / "tokenizer.model", is_grouped
    assert results(tmp_path, take_part_alone, arguments) == ["[False, True], [], 0"]
