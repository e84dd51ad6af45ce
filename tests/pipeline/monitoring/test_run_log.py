"""Log files as TensorBoard's reader and a JSON parser see them: after a resume, torn, and on a full disk.

Fails if one of TensorBoard's undocumented modules moves or changes.
"""

import os
import resource
import time
from datetime import datetime
from pathlib import Path

import pytest
from PIL import Image

from pipeline.checkpointing.run_folder import METRICS, read_metrics
from pipeline.monitoring.run_log import RunLog, table
from pipeline.monitoring.run_metadata import first_submission, record_start
from pipeline.runtime.launch import JobStep
from tests.integration.runs import accumulator, scalars


def log_steps(run: Path, after: int, last: int, value: float) -> None:
    log = RunLog(run, after, writes=True)
    log.truncate_after()
    log.add_hyperparameters({"network.d_model": 8, "free": True}, ["loss"], 0)
    log.add_text("run/recipe", f"from step {after}", after + 1)
    for step in range(after + 1, last + 1):
        log.log_metrics({"loss": value + step, "endless": float("inf")}, step)
        if step % 2 == 0:
            log.add_text("said", f"at {step}", step)
            log.add_image("seen", Image.new("RGB", (3, 2)), step)
    log.finalize("killed")


def test_one_run_one_curve(tmp_path: Path) -> None:
    log_steps(tmp_path, 0, 7, 0.25)
    log_steps(tmp_path, 4, 6, 0.5)
    log_steps(tmp_path, 4, 5, 0.75)  # from the same checkpoint again, for fewer steps
    log_steps(tmp_path, 5, 9, 0.125)
    expected = [*(step + 0.25 for step in range(1, 5)), 5.75, *(step + 0.125 for step in range(6, 10))]
    assert scalars(tmp_path, "loss") == list(enumerate(expected, 1))
    assert [(line["step"], line["loss"]) for line in read_metrics(tmp_path)] == list(enumerate(expected, 1))
    assert {line["endless"] for line in read_metrics(tmp_path)} == {None}
    events = accumulator(tmp_path)
    texts = {
        tag: [(e.step, e.tensor_proto.string_val[0]) for e in events.Tensors(f"{tag}/text_summary")]
        for tag in ("said", "run/recipe")
    }
    assert texts["said"] == [(step, f"at {step}".encode()) for step in (2, 4, 6, 8)]
    assert texts["run/recipe"] == [(1, b"from step 0"), (5, b"from step 4"), (6, b"from step 5")]
    assert [(event.step, event.width, event.height) for event in events.Images("seen")] == [
        (step, 3, 2) for step in (2, 4, 6, 8)
    ]
    assert events.SummaryMetadata("_hparams_/experiment").plugin_data.plugin_name == "hparams"


def test_a_tensorboard_that_was_open_shows_one_curve_too(tmp_path: Path) -> None:
    """It has read points that are no longer in a file: the record of the restart makes it discard them."""
    log_steps(tmp_path, 0, 7, 0.25)
    open_since = accumulator(tmp_path)
    log_steps(tmp_path, 4, 6, 0.5)
    open_since.Reload()
    expected = [*(step + 0.25 for step in range(1, 5)), 5.5, 6.5]
    assert [(event.step, event.value) for event in open_since.Scalars("loss")] == list(enumerate(expected, 1))


def test_one_curve_though_the_clock_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = time.time
    for hours, (after, last) in ((0, (0, 4)), (-2, (4, 6)), (-3, (6, 8)), (1, (8, 9))):
        monkeypatch.setattr(time, "time", lambda hours=hours: clock() + 3600 * hours)
        log_steps(tmp_path, after, last, 0.0)
    assert [step for step, _ in scalars(tmp_path, "loss")] == list(range(1, 10))


def log_with_validation(run: Path, after: int, last: int, validation_pending: bool) -> None:
    """Log a point per step, followed by a validation at every second step."""
    log = RunLog(run, after, writes=True, validation_pending=validation_pending)
    log.truncate_after()
    for step in range(after + 1, last + 1):
        log.log_metrics({"loss": float(step)}, step)
        if step % 2 == 0:
            log.log_metrics({"validation/loss": after + 0.5}, step)
    log.finalize("killed")


@pytest.mark.parametrize("pending", [False, True])
def test_a_validation_that_will_be_repeated_is_removed(tmp_path: Path, pending: bool) -> None:
    """Resume from step 4, once before its validation and once after it."""
    log_with_validation(tmp_path, 0, 5, False)
    log_with_validation(tmp_path, 4, 6, pending)
    validations = [(2, 0.5), (6, 4.5)] if pending else [(2, 0.5), (4, 0.5), (6, 4.5)]
    assert scalars(tmp_path, "validation/loss") == validations
    assert [
        (one["step"], one["validation/loss"]) for one in read_metrics(tmp_path) if "validation/loss" in one
    ] == validations
    assert [step for step, _ in scalars(tmp_path, "loss")] == [1, 2, 3, 4, 5, 6]
    assert [one["step"] for one in read_metrics(tmp_path) if "loss" in one] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("is_torn", [True, False])
def test_a_torn_record_and_garbage_after_a_power_cut_are_removed(tmp_path: Path, is_torn: bool) -> None:
    log_steps(tmp_path, 0, 3, 0.0)
    [events] = (tmp_path / "tensorboard").iterdir()
    for path in (events, tmp_path / METRICS):
        contents = path.read_bytes()
        path.write_bytes(contents[:-5] if is_torn else contents + b"\x0c" + bytes(60) + b"\n")
    log_steps(tmp_path, 3, 5, 0.0)
    kept = [1, 2] if is_torn else [1, 2, 3]
    assert [line["step"] for line in read_metrics(tmp_path)] == [*kept, 4, 5]
    assert [step for step, _ in scalars(tmp_path, "loss")] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("line", ['{"loss": 1.0}', '{"step": "4"}', "[4]"])
def test_a_line_without_a_step_is_removed_as_damaged(tmp_path: Path, line: str) -> None:
    log_steps(tmp_path, 0, 3, 0.0)
    with (tmp_path / METRICS).open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")
    log_steps(tmp_path, 3, 5, 0.0)
    assert [one["step"] for one in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    log = RunLog(tmp_path, 0, writes=False)
    log.log_metrics({"loss": 1.0}, 1)
    log.add_text("said", "nothing", 1)
    log.write("tensorboard/file", b"")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_warning_and_tears_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = RunLog(tmp_path, 0, writes=True)
    log.log_metrics({"loss": 1.0}, 1)
    sizes = {path: path.stat().st_size for path in (tmp_path / METRICS, *(tmp_path / "tensorboard").iterdir())}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max(sizes.values()) + 10, before[1]))
    try:
        for step in range(2, 9):
            log.log_metrics({"loss": 2.0, "another": 3.0}, step)
            log.write("summary.json", b"x" * 10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith(f"warning: {tmp_path}/tensorboard: ")
    # When there is space again, logging continues.
    log.log_metrics({"loss": 4.0}, 9)
    log.finalize("success")
    assert scalars(tmp_path, "loss")[0] == (1, 1.0)
    assert scalars(tmp_path, "loss")[-1] == (9, 4.0)
    assert all(line["step"] for line in read_metrics(tmp_path))


def test_a_table_shows_text_as_it_is() -> None:
    made = table(["source"], [["a | b *c* <script>&amp; `x`"]])
    assert made.splitlines()[:2] == ["| source |", "| --- |"]
    shown = made.splitlines()[2]
    assert not set("*<>`") & set(shown)
    assert shown.count("|") == 2


def test_each_start_is_recorded_with_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of a job that was in the queue, the second after it has started again twice; the third without one."""
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho JobId=$5 SubmitTime=2020-01-02T03:04:05 StartTime=Unknown\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for restarts, step in ((0, 0), (2, 40), (None, 60)):
        job = None if restarts is None else JobStep("7", 0, 0, 1, 1, 1, restarts)
        starts = record_start(RunLog(tmp_path / "run", step, writes=True), job, {"loss": "C++"})
    assert [(one["job"], one["restarts"], one["step"]) for one in starts] == [("7", 0, 0), ("7", 2, 40), (None, 0, 60)]
    assert first_submission(starts) == datetime(2020, 1, 2, 3, 4, 5).timestamp()
