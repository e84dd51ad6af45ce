"""Which checkpoints a run keeps, and the moving average in them, with a Trainer that trains a single weight."""

import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from data_module.system.files import PlainValues
from data_module.tokenization.tokenizer import Tokenizer
from pipeline.checkpointing import callback as callback_module
from pipeline.checkpointing import checkpoint_io as io_module
from pipeline.checkpointing.callback import EMA, CheckpointCallback
from pipeline.checkpointing.checkpoint import write_atomic
from pipeline.checkpointing.checkpoint_io import AtomicCheckpointIO, checkpoint_io
from pipeline.checkpointing.run_folder import step_checkpoints, step_of, step_path
from pipeline.config.recipe import load_recipe
from pipeline.config.settings import validation_tag
from pipeline.runtime.console import quiet_lightning
from pipeline.runtime.signals import Stopped
from pipeline.runtime.step_clock import StepClock
from tests.conftest import ALONE, ROOT

pytestmark = pytest.mark.filterwarnings("ignore:.*dataloader is not resumable.*", "ignore:.*sync_dist=True.*")

WEIGHTS = [1.0, 3.0, 7.0, 15.0, 31.0]
"""The weight after each step; step n adds 2 ** (n - 1)."""
AVERAGES = [1.0, 0.9 * 1 + 0.1 * 3, 0.9 * 1.2 + 0.1 * 7, 0.9 * 1.78 + 0.1 * 15, 0.9 * 3.102 + 0.1 * 31]
"""The moving average after each step, with a decay of 0.9."""


class OneWeight(LightningModule):
    """A module with one weight, whose validation scores by step are given as BLEU or another metric."""

    def __init__(self, bleu: dict[int, float] | None = None, metric: str = "bleu") -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.bleu, self.metric = bleu, metric
        self.validated: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return -self.weight * 2.0**self.global_step

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.validated.append(self.weight.item())
        if self.bleu is not None:
            self.log(validation_tag(self.metric), self.bleu.get(self.global_step, 0.0))

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
        mode: Literal["max", "min"] = "max",
        precision: str = "32-true",
        **settings: object,
    ) -> OneWeight:
        settings = {"checkpoint_every_steps": 1, "keep_last": 10, **settings}
        overrides = [f"--run.{name}={'null' if value is None else value}" for name, value in settings.items()]
        recipe = load_recipe([ROOT / "configs" / "demo.yaml"], overrides)
        module = OneWeight(bleu, recipe.run.best_by)
        checkpoint_callback = CheckpointCallback(tmp_path, recipe, tokenizer, clock or StepClock(), mode)
        before = [callback for callback in others if not isinstance(callback, StopAt)]
        after = [callback for callback in others if isinstance(callback, StopAt)]
        for callback in after:
            callback.checkpoint_callback = checkpoint_callback
        trainer = Trainer(
            accelerator="cpu",
            precision=precision,
            max_steps=max_steps,
            max_epochs=-1,
            val_check_interval=validate_every,
            check_val_every_n_epoch=None,
            num_sanity_val_steps=0,
            callbacks=[*before, checkpoint_callback, *after],
            plugins=[AtomicCheckpointIO()],
            **ALONE,
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

    def on_train_start(self, trainer: Trainer, *_: object) -> None:
        self.stop(trainer)

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        if not self.in_validation:
            self.stop(trainer)

    def on_validation_batch_end(self, trainer: Trainer, *_: object) -> None:
        self.stop(trainer)

    def stop(self, trainer: Trainer) -> None:
        if trainer.global_step == self.step:
            self.checkpoint_callback.save(trainer, stopping=True)
            raise Stopped("asked to stop")


def newest(run: Path) -> Path:
    return step_checkpoints(run)[-1]


def step_in(checkpoint: Path) -> int:
    return torch.load(checkpoint, weights_only=True)["global_step"]


def steps(run: Path) -> list[int]:
    """Return the steps of all checkpoints, and check that file names and contents agree."""
    found = [step_of(path) for path in step_checkpoints(run)]
    assert [step_in(path) for path in step_checkpoints(run)] == found
    return found


@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_the_moving_average_matches_one_computed_by_hand(train: Train, tmp_path: Path, precision: str) -> None:
    module = train(3, EMA(decay=0.9), validate_every=2, precision=precision)
    resumed = train(5, EMA(decay=0.9), validate_every=2, precision=precision, ckpt_path=newest(tmp_path))
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


@pytest.mark.parametrize(
    ("mode", "scores", "best_of", "best_by"),
    [
        ("max", {2: 10.0, 4: 30.0, 6: 20.0, 8: 25.0, 10: 30.0, 12: 40.0}, {6: 4, 10: 4, 12: 12}, "chrf"),
        ("min", {2: 40.0, 4: 10.0, 6: 20.0, 8: 5.0}, {6: 4, 8: 8}, "error_rate"),
        ("min", {2: 4.0, 4: 1.0, 6: 2.0}, {6: 4}, "likelihood"),
        ("max", {2: 0.0}, {2: 2}, "chrf"),  # the first one
        ("max", {2: math.nan, 4: 0.5, 6: math.inf}, {6: 4}, "chrf"),
    ],
)
def test_the_best_validation_is_kept(
    train: Train, tmp_path: Path, mode: str, scores: dict[int, float], best_of: dict[int, int], best_by: str
) -> None:
    """Train to each of the steps of `best_of`, resuming: its value is the best one's step."""
    for last, best in best_of.items():
        path = newest(tmp_path) if step_checkpoints(tmp_path) else None
        train(last, bleu=scores, validate_every=2, mode=mode, best_by=best_by, ckpt_path=path)
        assert step_in(tmp_path / "checkpoints" / "best.ckpt") == best


@pytest.mark.filterwarnings("ignore:.*no `val_dataloader`.*")
def test_a_run_without_validation(train: Train, tmp_path: Path) -> None:
    """Checkpoints are not delayed until a validation."""
    train(3, checkpoint_every_steps=2, validate_every=2, is_validated=False)
    assert steps(tmp_path) == [2, 3]


def test_a_checkpoint_removed_by_another_process_is_no_error(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def list_and_remove(run: Path, *, around_best: bool = False) -> list[Path]:
        paths = step_checkpoints(run, around_best=around_best)
        for path in [] if around_best else paths[:-2]:
            path.unlink()
        return paths

    monkeypatch.setattr(callback_module, "step_checkpoints", list_and_remove)
    train(4, keep_last=2)
    assert steps(tmp_path) == [3, 4]


def test_writing_checkpoints_is_timed_separately(train: Train) -> None:
    clock, begun = StepClock(), []
    clock.begin = begun.append  # type: ignore[method-assign]
    train(2, clock=clock)
    assert begun == ["checkpoint", "loop_overhead"] * 3  # two are saved, and the end waits for the second


def test_the_checkpoint_of_a_validated_step_is_saved_after_the_validation(train: Train, tmp_path: Path) -> None:
    """Resuming from it does not repeat the validation, and keeps the best BLEU."""
    bleu, seen = {2: 30.0, 4: 20.0}, []
    recorder = Callback()
    recorder.on_validation_start = lambda *_: seen.append(steps(tmp_path))  # type: ignore[method-assign]
    train(2, recorder, bleu=bleu, checkpoint_every_steps=2, validate_every=2)
    # If it were saved before, a run killed in the validation would skip the validation.
    assert seen == [[]]
    [second] = step_checkpoints(tmp_path)
    resumed = train(4, bleu=bleu, checkpoint_every_steps=2, validate_every=2, ckpt_path=second)
    assert len(resumed.validated) == 1
    assert step_in(tmp_path / "checkpoints" / "best.ckpt") == 2


@pytest.mark.parametrize(
    "starts",
    [
        # Checkpoints to average are as far apart as the recipe specifies: that of a stop between two is replaced.
        [(6, 1000, [4, 6]), (7, 1000, [4, 7]), (None, 1000, [4, 8, 12])],
        [(6, 1000, [4, 6]), (6, 1000, [4, 6]), (None, 1000, [4, 8, 12])],
        # A stop at an interval leaves a regular checkpoint, also a second one before the next step.
        [(4, 1000, [4]), (4, 1000, [4]), (None, 1000, [4, 8, 12])],
        # A step to be validated is not saved before its validation.
        [(8, 4, [4, 8]), (None, 1000, [4, 8, 12])],
    ],
)
def test_stops_leave_regular_checkpoints(
    train: Train, tmp_path: Path, starts: list[tuple[int | None, int, list[int]]]
) -> None:
    """Each start resumes: the step after which it stops, validations, and the checkpoints that there are then."""
    for stop, validate_every, expected in starts:
        path = newest(tmp_path) if step_checkpoints(tmp_path) else None
        others = [] if stop is None else [StopAt(stop)]
        train(12, *others, checkpoint_every_steps=4, validate_every=validate_every, ckpt_path=path)
        assert steps(tmp_path) == expected


def test_the_checkpoint_of_a_stop_is_gone_when_it_is_to_be_replaced(train: Train, tmp_path: Path) -> None:
    train(20, StopAt(6), checkpoint_every_steps=4)
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

        def on_train_batch_start(self, trainer: Trainer, *_: object) -> None:
            self.seconds += 24.0 if trainer.global_step < 4 else 40.0

    tick = Tick()
    monkeypatch.setattr(time, "monotonic", lambda: tick.seconds)
    train(11, tick, checkpoint_every_steps=None, checkpoint_every_minutes=1.6, log_every_steps=2)
    # After 96 s, after another 160 s, and after the last step.
    assert steps(tmp_path) == [4, 8, 11]


def around_best(run: Path) -> list[int]:
    """Return the steps of the checkpoints in the folder for those around the best validation."""
    return [step_of(path) for path in step_checkpoints(run, around_best=True)]


@pytest.mark.parametrize("keep", [1, 3])
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


class SlowDisk:
    """Holds writes of checkpoints back; what is written then is written as always."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[str] = []
        self.most_at_a_time = 0
        self._now = 0
        self.go_on = threading.Event()
        self.seconds = 60.0
        """A write takes this long, or until `go_on` is set."""
        monkeypatch.setattr(io_module, "write_atomic", self.write)

    def write(self, contents: PlainValues, path: Path) -> None:
        self.begun.append(path.name)
        self._now += 1
        self.most_at_a_time = max(self.most_at_a_time, self._now)
        self.go_on.wait(self.seconds)
        write_atomic(contents, path)
        self._now -= 1


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> SlowDisk:
    return SlowDisk(monkeypatch)


class At(Callback):
    """Call a function at the end of a step, after the checkpoint callback's turn of the step before."""

    def __init__(self, step: int, function: Callable[[Trainer], None]) -> None:
        self.step, self.function = step, function

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        if trainer.global_step == self.step:
            self.function(trainer)


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("*.ckpt"))


def test_nothing_is_removed_before_its_successor_has_its_name(
    train: Train, tmp_path: Path, slow_disk: SlowDisk
) -> None:
    """Training goes on while step 4 is written.

    Until then the checkpoint of a stop after step 3, which it replaces, is there, and so is the best one so far.
    """
    slow_disk.go_on.set()
    options = {"checkpoint_every_steps": 2, "keep_last": 1, "validate_every": 2}
    train(9, StopAt(3), bleu={2: 10.0}, **options)
    slow_disk.go_on.clear()
    seen: list[tuple[list[str], int]] = []

    def look(trainer: Trainer) -> None:
        seen.append((names(tmp_path), step_in(tmp_path / "checkpoints" / "best.ckpt")))
        slow_disk.go_on.set()
        checkpoint_io(trainer).wait()
        seen.append((names(tmp_path), step_in(tmp_path / "checkpoints" / "best.ckpt")))

    train(5, At(5, look), bleu={2: 10.0, 4: 20.0}, ckpt_path=newest(tmp_path), **options)
    assert seen == [(["best.ckpt", "step=00000003.ckpt"], 2), (["best.ckpt", "step=00000004.ckpt"], 4)]


def test_one_write_is_in_flight_at_a_time(train: Train, tmp_path: Path, slow_disk: SlowDisk) -> None:
    slow_disk.seconds = 0.1
    train(6, bleu={2: 1.0, 4: 2.0}, validate_every=2)
    assert slow_disk.most_at_a_time == 1
    # In the order of the steps; the best is written first, and the last one before training ends.
    best = "best.ckpt"
    steps_and_best = ["step=00000001.ckpt", best, "step=00000002.ckpt", "step=00000003.ckpt"]
    steps_and_best += [best, *(f"step={step:08d}.ckpt" for step in (4, 5, 6))]
    assert slow_disk.begun == steps_and_best
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]


def test_the_best_and_the_step_are_written_from_one_copy(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    take = io_module.HostCopy.take

    def count(self: io_module.HostCopy, contents: PlainValues) -> PlainValues | None:
        taken.append(contents["global_step"])
        return take(self, contents)

    monkeypatch.setattr(io_module.HostCopy, "take", count)
    train(3, bleu={2: 10.0}, checkpoint_every_steps=2, validate_every=2)
    assert taken == [2, 3]
    assert (tmp_path / "checkpoints" / "best.ckpt").read_bytes() == step_path(tmp_path, 2).read_bytes()
    train(7, bleu={5: 20.0}, checkpoint_every_steps=2, validate_every=5, ckpt_path=newest(tmp_path))
    assert taken == [2, 3, 4, 5, 6, 7]  # the best step is not due
    assert step_in(tmp_path / "checkpoints" / "best.ckpt") == 5


def obstruct(step: int, run: Path) -> Path:
    """Make a checkpoint impossible to write: a folder has its name."""
    path = step_path(run, step)
    (path / "something").mkdir(parents=True)
    return path


def test_a_failed_write_ends_training_after_the_next_step(train: Train, tmp_path: Path) -> None:
    obstruct(4, tmp_path)
    last: list[int] = []

    class WaitForWrite(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: object) -> None:
            last.append(trainer.global_step)
            checkpoint_io(trainer).join()

    with pytest.raises(IsADirectoryError):
        train(9, WaitForWrite(), checkpoint_every_steps=2, keep_last=1)
    assert last[-1] == 4  # of the step that follows
    assert step_in(step_path(tmp_path, 2)) == 2
    assert not list((tmp_path / "checkpoints").glob(".*"))


@pytest.mark.parametrize("last", [4, 5])
def test_a_failed_write_is_an_error_at_the_end(train: Train, tmp_path: Path, last: int) -> None:
    """Of the last checkpoint, or of one that is still being written when the last is due."""
    obstruct(4, tmp_path)
    with pytest.raises(IsADirectoryError):
        train(last, checkpoint_every_steps=2, keep_last=1)
    assert step_in(step_path(tmp_path, 2)) == 2
    assert not step_path(tmp_path, 5).exists()


def test_an_error_in_training_does_not_lose_the_checkpoint_in_flight(
    train: Train, tmp_path: Path, slow_disk: SlowDisk, capsys: pytest.CaptureFixture[str]
) -> None:
    slow_disk.seconds = 0.5

    def fail(_: Trainer) -> None:
        raise ArithmeticError("a bug of this step")

    with pytest.raises(ArithmeticError, match="a bug of this step"):
        train(9, At(3, fail), checkpoint_every_steps=2)
    assert steps(tmp_path) == [2]
    # If that cannot be written, training's own error is raised all the same.
    obstruct(4, tmp_path)
    with pytest.raises(ArithmeticError, match="a bug of this step"):
        train(9, At(5, fail), checkpoint_every_steps=2, ckpt_path=step_path(tmp_path, 2))
    [warning] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert warning.startswith("warning: the last checkpoint was not written: ")
    assert str(step_path(tmp_path, 4)) in warning


def test_files_of_both_ways_are_equal(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without room for the copy, training waits for the write, and one line says so."""
    options = {"bleu": {2: 10.0, 3: 20.0}, "validate_every": 1, "checkpoint_every_steps": 2, "keep_last": 1}
    writers: set[str] = set()

    def write(contents: PlainValues, path: Path) -> None:
        writers.add(threading.current_thread().name.partition("_")[0])
        write_atomic(contents, path)

    monkeypatch.setattr(io_module, "write_atomic", write)
    train(4, EMA(decay=0.9), **options)
    assert writers == {"checkpoint-writer"}
    line = capsys.readouterr().err
    assert "; written in the background from a copy in memory of 1 MB" in line
    files = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*.ckpt")}
    assert len(files) == 2
    for path in files:
        (tmp_path / path).unlink()
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "100")
    writers.clear()
    train(4, EMA(decay=0.9), **options)
    [line] = capsys.readouterr().err.splitlines()
    assert "; training waits while they are written: no memory for a copy of 1 MB" in line
    assert writers == {"MainThread"}
    assert {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*.ckpt")} == files
