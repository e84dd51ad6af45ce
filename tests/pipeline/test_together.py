"""Two ranks that train: where one is asked to stop both stop after the same step, and where one fails both name it."""

import multiprocessing
import os
import re
import signal
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

from data_module.tokenizer import Tokenizer
from pipeline import stop_request
from pipeline.checkpoint import step_checkpoints, step_of
from pipeline.checkpoint_keeper import CheckpointKeeper, WholeCheckpointIO
from pipeline.fit import quiet_lightning
from pipeline.monitoring.step_clock import StepClock
from pipeline.recipe import load_recipe
from pipeline.together import Together, own_signals, validation_is_pending
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
        if self.event.is_failure:
            raise ArithmeticError("a bug of this step")
        os.kill(os.getpid(), signal.SIGUSR1)

    def on_fit_start(self) -> None:
        self.happens(0)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.happens(self.global_step + 1)
        return -self.weight

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.num_batches += 1
        if batch_idx == 1:
            self.happens(self.global_step, in_validation=True)

    def on_validation_epoch_end(self) -> None:
        self.validated[self.global_step] = self.num_batches

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def train(folder: Path, tokenizer: Path, event: Event | None, max_steps: int, max_seconds: float | None) -> str:
    """Train from the newest checkpoint that is there; returns how it ended, and the validations done."""
    stop_request.install()
    quiet_lightning()
    recipe = load_recipe([ROOT / "configs" / "demo.yaml"], ["--run.checkpoint_every_steps", "1000"])
    keeper = CheckpointKeeper(folder, recipe, Tokenizer.load(tokenizer), StepClock())
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
        callbacks=[keeper, Together(keeper, TIMEOUT_SECONDS, max_seconds)],
        plugins=[WholeCheckpointIO(), LightningEnvironment()],
    )
    own_signals(trainer)
    newest = step_checkpoints(folder)[-1:]
    data = DataLoader(torch.zeros(5)), DataLoader(torch.zeros(6))
    try:
        trainer.fit(module, *data, ckpt_path=newest[0] if newest else None)
        end = f"ended at step {trainer.global_step}"
    except stop_request.Stopped as stop:
        end = f"{stop} (exit code {stop.exit_code})"
    except Exception as error:
        return "\n".join(error.__notes__)
    dist.barrier()
    return f"{end}, validated {module.validated}"


def rank(number: int, folder: Path, tokenizer: Path, event: Event | None, *limits: Any) -> None:
    """In a process of its own; leaves how it ended in a file."""
    os.environ |= {"LOCAL_RANK": str(number), "WORLD_SIZE": "2"}
    store = dist.FileStore(str(folder / "store"), 2)
    timeout = timedelta(seconds=TIMEOUT_SECONDS)
    dist.init_process_group("gloo", store=store, rank=number, world_size=2, timeout=timeout)
    (folder / f"rank-{number}").write_text(train(folder, tokenizer, event, *limits))
    os._exit(0)


def two_ranks(
    folder: Path,
    corpus: Path,
    *events: Event | None,
    max_steps: int = 20,
    max_seconds: float | None = None,
) -> list[str]:
    """How each rank ended, given what happens to each."""
    (folder / "store").unlink(missing_ok=True)
    tokenizer = corpus / "tokenizer.model"
    ranks = [
        FORK.Process(target=rank, args=(number, folder, tokenizer, event, max_steps, max_seconds))
        for number, event in enumerate(events)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0, 0]
    return [(folder / f"rank-{number}").read_text() for number in (0, 1)]


def test_both_stop_after_the_same_step(tiny_corpus: Path, tmp_path: Path) -> None:
    """One is asked in a step; by the end of the next the other knows."""
    stopped = "asked to stop: saved after step 4; the same command goes on from there (exit code 75), validated {}"
    assert two_ranks(tmp_path, tiny_corpus, None, Event(3), max_seconds=600.0) == [stopped] * 2
    [fourth] = step_checkpoints(tmp_path)
    assert step_of(fourth) == 4
    # That step's validation is still to be done; asked in it, both stop in it, and it is done again from its beginning.
    assert validation_is_pending(fourth)
    assert two_ranks(tmp_path, tiny_corpus, Event(4, in_validation=True), None) == [stopped] * 2
    assert step_checkpoints(tmp_path) == [fourth]
    assert validation_is_pending(fourth)
    # In the last step there is nothing to stop.
    ends = two_ranks(tmp_path, tiny_corpus, None, Event(5), max_steps=6)
    assert ends == ["ended at step 6, validated {4: 6}"] * 2
    assert not validation_is_pending(step_checkpoints(tmp_path)[-1])


def test_both_stop_before_the_first_step(tiny_corpus: Path, tmp_path: Path) -> None:
    ends = two_ranks(tmp_path, tiny_corpus, None, Event(0))
    assert ends[0] == ends[1]
    assert ends[0].startswith("asked to stop during start-up; nothing was lost")
    assert not step_checkpoints(tmp_path)


def test_both_stop_when_the_time_is_over(tiny_corpus: Path, tmp_path: Path) -> None:
    """And say so, but for one that was asked as well."""
    ends = two_ranks(tmp_path, tiny_corpus, None, Event(2), max_seconds=0.0)
    assert ends[0].startswith("trainer.max_time is over: saved after step 2; ")
    assert ends[1].startswith("asked to stop: saved after step 2; ")
    [second] = step_checkpoints(tmp_path)
    assert not validation_is_pending(second)


def test_the_rank_that_failed_is_named_by_both(tiny_corpus: Path, tmp_path: Path) -> None:
    waiting, failed = two_ranks(tmp_path, tiny_corpus, None, Event(3, is_failure=True))
    assert re.fullmatch(r"step 2: rank 1 on \S+ failed: ArithmeticError: a bug of this step", waiting)
    assert re.fullmatch(r"step 2: rank 1 on \S+ failed", failed)
