"""Which checkpoints a run keeps, and the moving average in them, with a Trainer that trains a single weight."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from data_module.tokenization.tokenizer import Tokenizer
from pipeline.checkpointing import callback as callback_module
from pipeline.checkpointing.callback import CheckpointCallback
from pipeline.checkpointing.checkpoint import read_checkpoint
from pipeline.checkpointing.checkpoint_files import around_best_checkpoints, step_checkpoints, step_of, step_path
from pipeline.checkpointing.checkpoint_io import AtomicCheckpointIO
from pipeline.checkpointing.ema import EMA
from pipeline.config.recipe import load_recipe
from pipeline.profiling.step_clock import StepClock
from pipeline.runtime.console import quiet_lightning
from pipeline.runtime.signals import Stopped
from tests.conftest import ROOT

pytestmark = pytest.mark.filterwarnings("ignore:.*dataloader is not resumable.*", "ignore:.*sync_dist=True.*")

WEIGHTS = [1.0, 3.0, 7.0, 15.0, 31.0]
"""The weight after each step; step n adds 2 ** (n - 1)."""
AVERAGES = [1.0, 0.9 * 1 + 0.1 * 3, 0.9 * 1.2 + 0.1 * 7, 0.9 * 1.78 + 0.1 * 15, 0.9 * 3.102 + 0.1 * 31]
"""The moving average after each step, with a decay of 0.9."""


class OneWeight(LightningModule):
    """A module with one weight, whose validation BLEU by step is given."""

    def __init__(self, bleu: dict[int, float] | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.bleu = bleu
        self.validated: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return -self.weight * 2.0**self.global_step

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.validated.append(self.weight.item())
        if self.bleu is not None:
            self.log("validation/bleu", self.bleu.get(self.global_step, 0.0))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


Train = Callable[..., OneWeight]


@pytest.fixture
def train(tiny_corpus: Path, tmp_path: Path) -> Train:
    """A function that trains in `tmp_path`; its other keyword arguments are settings of the recipe's `run` section."""
    quiet_lightning()
    tokenizer = Tokenizer.load(tiny_corpus / "tokenizer.model")

    def run(
        max_steps: int,
        *others: Callback,
        bleu: dict[int, float] | None = None,
        ckpt_path: Path | None = None,
        validate_every: int = 1000,
        is_validated: bool = True,
        clock: StepClock | None = None,
        **settings: Any,
    ) -> OneWeight:
        settings = {"checkpoint_every_steps": 1, "keep_last": 10, **settings}
        overrides = [f"--run.{name}={'null' if value is None else value}" for name, value in settings.items()]
        recipe = load_recipe([ROOT / "configs" / "demo.yaml"], overrides)
        module = OneWeight(bleu)
        checkpoint_callback = CheckpointCallback(tmp_path, recipe, tokenizer, clock or StepClock())
        before = [callback for callback in others if not isinstance(callback, StopAt)]
        after = [callback for callback in others if isinstance(callback, StopAt)]
        for callback in after:
            callback.checkpoint_callback = checkpoint_callback
        trainer = Trainer(
            accelerator="cpu",
            max_steps=max_steps,
            max_epochs=-1,
            val_check_interval=validate_every,
            check_val_every_n_epoch=None,
            num_sanity_val_steps=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[*before, checkpoint_callback, *after],
            plugins=[AtomicCheckpointIO()],
        )
        with suppress(Stopped):
            validation = DataLoader(torch.zeros(1)) if is_validated else None
            trainer.fit(module, DataLoader(torch.zeros(7)), validation, ckpt_path=ckpt_path)
        return module

    return run


class StopAt(Callback):
    """Save and stop as on a signal: after a step, in its validation, or before the next step."""

    checkpoint_callback: CheckpointCallback

    def __init__(self, step: int, in_validation: bool = False) -> None:
        self.step, self.in_validation = step, in_validation

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        self.stop(trainer)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if not self.in_validation:
            self.stop(trainer)

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.stop(trainer)

    def stop(self, trainer: Trainer) -> None:
        if trainer.global_step == self.step:
            self.checkpoint_callback.save(trainer, stopping=True)
            raise Stopped("asked to stop")


class RecordCheckpoints(Callback):
    """Record which checkpoints exist when a validation starts."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.seen: list[list[int]] = []

    def on_validation_start(self, *_: Any) -> None:
        self.seen.append(steps(self.run))


def newest(run: Path) -> Path:
    return step_checkpoints(run)[-1]


def step_in(checkpoint: Path) -> int:
    return read_checkpoint(checkpoint)["global_step"]


def steps(run: Path) -> list[int]:
    """Return the steps of all checkpoints, and check that file names and contents agree."""
    found = [step_of(path) for path in step_checkpoints(run)]
    assert [step_in(path) for path in step_checkpoints(run)] == found
    return found


def test_the_moving_average_matches_one_computed_by_hand(train: Train, tmp_path: Path) -> None:
    module = train(3, EMA(decay=0.9), validate_every=2)
    resumed = train(5, EMA(decay=0.9), validate_every=2, ckpt_path=newest(tmp_path))
    # Validation and translation use the average; training uses the weights.
    assert [*module.validated, *resumed.validated] == pytest.approx([AVERAGES[1], AVERAGES[3]])
    contents = [torch.load(path, weights_only=True) for path in step_checkpoints(tmp_path)]
    assert [checkpoint["state_dict"]["weight"].item() for checkpoint in contents] == pytest.approx(AVERAGES)
    assert [checkpoint["current_model_state"]["weight"].item() for checkpoint in contents] == WEIGHTS
    assert resumed.weight.item() == WEIGHTS[-1]


def test_stopped_while_the_moving_average_is_validated(train: Train, tmp_path: Path) -> None:
    """Weights and average are swapped during validation."""
    train(5, EMA(decay=0.9), StopAt(4, in_validation=True), validate_every=4)
    contents = torch.load(newest(tmp_path), weights_only=True)
    assert contents["state_dict"]["weight"].item() == pytest.approx(AVERAGES[3])
    assert contents["current_model_state"]["weight"].item() == WEIGHTS[3]
    assert train(5, EMA(decay=0.9), ckpt_path=newest(tmp_path)).weight.item() == WEIGHTS[4]
    assert torch.load(newest(tmp_path), weights_only=True)["state_dict"]["weight"].item() == pytest.approx(AVERAGES[4])


def test_the_best_bleu_is_kept_when_resuming(train: Train, tmp_path: Path) -> None:
    best = tmp_path / "checkpoints" / "best.ckpt"
    bleu = {2: 10.0, 4: 30.0, 6: 20.0, 8: 25.0, 10: 30.0, 12: 40.0}
    train(6, bleu=bleu, validate_every=2)
    assert step_in(best) == 4
    train(10, bleu=bleu, validate_every=2, ckpt_path=newest(tmp_path))
    assert step_in(best) == 4
    train(12, bleu=bleu, validate_every=2, ckpt_path=newest(tmp_path))
    assert step_in(best) == 12


def test_the_first_validation_is_the_best_so_far(train: Train, tmp_path: Path) -> None:
    train(2, bleu={2: 0.0}, validate_every=2)
    assert step_in(tmp_path / "checkpoints" / "best.ckpt") == 2


def test_the_newest_are_kept(train: Train, tmp_path: Path) -> None:
    train(11, checkpoint_every_steps=2, keep_last=3, log_every_steps=1)
    assert steps(tmp_path) == [8, 10, 11]  # the last step is always saved


@pytest.mark.filterwarnings("ignore:.*no `val_dataloader`.*")
def test_a_run_without_validation(train: Train, tmp_path: Path) -> None:
    """Checkpoints are not delayed until a validation."""
    train(3, checkpoint_every_steps=2, validate_every=2, is_validated=False)
    assert steps(tmp_path) == [2, 3]


def test_a_checkpoint_removed_by_another_process_is_no_error(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def list_and_remove(run: Path) -> list[Path]:
        paths = step_checkpoints(run)
        for path in paths[:-2]:
            path.unlink()
        return paths

    monkeypatch.setattr(callback_module, "step_checkpoints", list_and_remove)
    train(4, keep_last=2)
    assert steps(tmp_path) == [3, 4]


def test_writing_checkpoints_is_timed_separately(train: Train) -> None:
    class RecordingClock(StepClock):
        def __init__(self) -> None:
            super().__init__()
            self.begun: list[str] = []

        def begin(self, stretch: str) -> None:
            self.begun.append(stretch)

    clock = RecordingClock()
    train(2, clock=clock)
    assert clock.begun == ["checkpoint", "between"] * 2


def test_the_checkpoint_of_a_validated_step_is_saved_after_the_validation(train: Train, tmp_path: Path) -> None:
    """Resuming from it does not repeat the validation, and keeps the best BLEU."""
    bleu = {2: 30.0, 4: 20.0}
    recorder = RecordCheckpoints(tmp_path)
    train(2, recorder, bleu=bleu, checkpoint_every_steps=2, validate_every=2)
    # If it were saved before, a run killed in the validation would skip the validation.
    assert recorder.seen == [[]]
    [second] = step_checkpoints(tmp_path)
    resumed = train(4, bleu=bleu, checkpoint_every_steps=2, validate_every=2, ckpt_path=second)
    assert len(resumed.validated) == 1
    assert step_in(tmp_path / "checkpoints" / "best.ckpt") == 2


def test_the_checkpoint_of_a_stop_between_two_intervals_is_replaced(train: Train, tmp_path: Path) -> None:
    """Checkpoints to average are as far apart as the recipe specifies."""
    train(20, StopAt(6), checkpoint_every_steps=4)
    assert steps(tmp_path) == [4, 6]
    train(20, StopAt(7), checkpoint_every_steps=4, ckpt_path=newest(tmp_path))
    assert steps(tmp_path) == [4, 7]
    train(12, checkpoint_every_steps=4, ckpt_path=newest(tmp_path))
    assert steps(tmp_path) == [4, 8, 12]


def test_a_stop_at_an_interval_leaves_a_regular_checkpoint(train: Train, tmp_path: Path) -> None:
    train(20, StopAt(4), checkpoint_every_steps=4)
    # Stop again before the next step, as in a repeated validation.
    train(20, StopAt(4), checkpoint_every_steps=4, ckpt_path=newest(tmp_path))
    train(8, checkpoint_every_steps=4, ckpt_path=newest(tmp_path))
    assert steps(tmp_path) == [4, 8]
    # A step to be validated is not saved before its validation.
    train(20, StopAt(12), checkpoint_every_steps=4, validate_every=4, ckpt_path=newest(tmp_path))
    train(16, checkpoint_every_steps=4, ckpt_path=newest(tmp_path))
    assert steps(tmp_path) == [4, 8, 12, 16]


def test_a_run_stopped_twice_at_one_step_between_two_intervals(train: Train, tmp_path: Path) -> None:
    train(20, StopAt(6), checkpoint_every_steps=4)
    train(20, StopAt(6), checkpoint_every_steps=4, ckpt_path=newest(tmp_path))
    assert steps(tmp_path) == [4, 6]
    # The checkpoint of the stop no longer exists when it is to be replaced.
    train(8, checkpoint_every_steps=4, ckpt_path=newest(tmp_path).rename(tmp_path / "moved.ckpt"))
    assert steps(tmp_path) == [4, 8]


def test_checkpoints_newer_than_the_resumed_one_are_not_counted(train: Train, tmp_path: Path) -> None:
    train(3)
    later = tmp_path / "checkpoints" / "step=00000100.ckpt"
    later.write_bytes(b"cut short")
    train(5, keep_last=2, ckpt_path=step_checkpoints(tmp_path)[-2])
    assert [step_of(path) for path in step_checkpoints(tmp_path)] == [4, 5, 100]


def test_checkpoints_by_time(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take 24 s, and 40 s from step 5 on. The time is checked every `log_every_steps` steps."""

    class Tick(Callback):
        seconds = 1000.0

        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            self.seconds += 24.0 if trainer.global_step < 4 else 40.0

    tick = Tick()
    monkeypatch.setattr(time, "monotonic", lambda: tick.seconds)
    train(11, tick, checkpoint_every_steps=None, checkpoint_every_minutes=1.6, log_every_steps=2)
    # After 96 s, after another 160 s, and after the last step.
    assert steps(tmp_path) == [4, 8, 11]


def around_best(run: Path) -> list[int]:
    """Return the steps of the checkpoints in the folder for those around the best validation."""
    return [step_of(path) for path in around_best_checkpoints(run)]


@pytest.mark.parametrize("keep", [1, 2, 3, 4])
@pytest.mark.parametrize("validate_every", [2, 3])
def test_checkpoints_around_the_best_validation_are_kept(
    train: Train, tmp_path: Path, keep: int, validate_every: int
) -> None:
    """At each end they are those that one would keep who had never removed any."""
    scores = [5.0, 9.0, 1.0, 7.0, 12.0, 3.0, 11.0, 2.0]
    bleu = {validate_every * number: score for number, score in enumerate(scores, 1)}
    options = {"bleu": bleu, "validate_every": validate_every, "checkpoint_every_steps": 2, "keep_last": keep}
    for last in range(4, 8 * validate_every + 1, 4):
        train(last, ckpt_path=newest(tmp_path) if last > 4 else None, **options)
        validated = {step: score for step, score in bleu.items() if step <= last}
        best = max(validated, key=lambda step: validated[step])
        every = range(2, last + 1, 2)
        near = set(sorted(every, key=lambda step: (abs(step - best), -step))[:keep])
        assert steps(tmp_path) == list(every)[-keep:]
        assert around_best(tmp_path) == sorted(near - set(list(every)[-keep:]))


def test_stops_do_not_change_which_checkpoints_are_kept(train: Train, tmp_path: Path) -> None:
    options = {
        "bleu": {3: 10.0, 6: 40.0, 9: 20.0, 12: 30.0, 15: 1.0},
        "validate_every": 3,
        "checkpoint_every_steps": 2,
        "keep_last": 3,
    }
    train(16, StopAt(5), **options)
    for step in (7, 8, 11, 13):
        train(16, StopAt(step), ckpt_path=newest(tmp_path), **options)
    train(16, ckpt_path=newest(tmp_path), **options)
    assert steps(tmp_path) == [12, 14, 16]
    assert around_best(tmp_path) == [4, 6, 8]
    assert step_in(tmp_path / "checkpoints" / "best.ckpt") == 6


def test_a_run_that_repeats_steps_keeps_the_same_checkpoints(train: Train, tmp_path: Path) -> None:
    """Newer checkpoints are damaged: the run resumes from an earlier one, and moves the same checkpoints again."""
    options = {"bleu": {4: 40.0, 8: 10.0}, "validate_every": 4, "checkpoint_every_steps": 1, "keep_last": 3}
    train(9, **options)
    assert (steps(tmp_path), around_best(tmp_path)) == ([7, 8, 9], [3, 4, 5])
    train(9, ckpt_path=step_path(tmp_path, 7), **options)
    assert (steps(tmp_path), around_best(tmp_path)) == ([7, 8, 9], [3, 4, 5])
    # A run that starts again from the beginning has no use for those of an earlier start.
    train(2, **options)
    assert around_best(tmp_path) == []


def test_a_run_of_an_earlier_version_keeps_them_from_its_next_best_on(train: Train, tmp_path: Path) -> None:
    options = {"validate_every": 4, "checkpoint_every_steps": 1, "keep_last": 2}
    train(6, bleu={4: 40.0}, **options)
    contents = torch.load(newest(tmp_path), weights_only=True)
    del contents["callbacks"]["CheckpointKeeper"]["best_step"]
    torch.save(contents, newest(tmp_path))
    train(10, bleu={8: 30.0}, ckpt_path=newest(tmp_path), **options)
    assert (steps(tmp_path), around_best(tmp_path)) == ([9, 10], [])
    train(16, bleu={12: 50.0}, ckpt_path=newest(tmp_path), **options)
    assert (steps(tmp_path), around_best(tmp_path)) == ([15, 16], [12, 13])
