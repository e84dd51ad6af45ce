"""An epoch's plan is computed once per node; old plans are removed."""

import errno
import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from data_module.batching import batch_plan
from data_module.batching.batch_plan import KEPT_PLANS, EpochPlan, Epochs, shared_plan
from data_module.corpus.store import open_corpus

pytestmark = pytest.mark.usefixtures("own_plans")
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def source(tiny_corpus: Path) -> Epochs:
    return Epochs([open_corpus(tiny_corpus, "train")], batch_tokens=400, seed=1)


def plan_files(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("**/*.plan")}


def test_plans_of_other_settings_are_not_reused(tiny_corpus: Path) -> None:
    settings = {"batch_tokens": 400, "seed": 1}
    plans = []
    for split, change in (
        ("train", {}),
        ("train", {"seed": 2}),
        ("train", {"batch_tokens": 300}),
        ("train", {"weights": ((100, 200), (1.0, 2.0))}),
        ("train", {"weights": ((100, 200), (2.0, 1.0))}),
        ("train", {"weights": ((200, 100), (2.0, 1.0))}),
        ("validation", {}),
    ):
        source = Epochs([open_corpus(tiny_corpus, split)], **{**settings, **change})
        for epoch in (0, 1):
            plans.append(source.get(epoch).plan)
            assert np.array_equal(plans[-1].numbers, source.compute(epoch).numbers)
            assert not plans[-1].numbers.flags.writeable
    assert len({plan.numbers.tobytes() for plan in plans}) == len(plans)


def test_plans_of_other_code_are_not_reused(source: Epochs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = source.get(0).plan
    files = plan_files(tmp_path)
    # What counts is the code that runs, whatever has become of its file.
    monkeypatch.setattr(batch_plan, "__file__", str(tmp_path / "none.py"))
    source.get(0)
    assert plan_files(tmp_path) == files
    monkeypatch.setattr(batch_plan, "_CODE", batch_plan._CODE + b"# changed")
    again = source.get(0).plan
    assert np.array_equal(again.numbers, first.numbers)
    assert plan_files(tmp_path) - files


def make_slowly(folder: Path, record: Path) -> EpochPlan:
    """Open a plan as a rank does, and record each computation."""

    def make() -> EpochPlan:
        with record.open("a") as file:
            file.write("made\n")
        time.sleep(0.5)
        return EpochPlan(np.array([1, 0, 2, 7, 0, 1], dtype=np.uint32))

    return shared_plan(folder, "one", make)


def test_one_of_several_processes_computes(tmp_path: Path) -> None:
    record = tmp_path / "record"
    ranks = [FORK.Process(target=make_slowly, args=(tmp_path, record)) for _ in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * 4
    assert record.read_text() == "made\n"
    assert make_slowly(tmp_path, record).target_tokens(0) == 7


def test_a_killed_process_leaves_no_lock_and_no_partial_file(tmp_path: Path) -> None:
    record = tmp_path / "record"
    owner = FORK.Process(target=make_slowly, args=(tmp_path, record))
    owner.start()
    while not (record.exists() and record.read_text()):
        time.sleep(0.01)
    os.kill(owner.pid or 0, signal.SIGKILL)
    owner.join()
    assert not plan_files(tmp_path)
    make_slowly(tmp_path, record)
    assert record.read_text() == "made\nmade\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "one.plan", "record"]


def test_old_plans_are_removed_and_stay_readable(source: Epochs, tmp_path: Path) -> None:
    first = source.get(0).plan
    before = first.numbers.tolist()
    names = [*plan_files(tmp_path)]
    for epoch in range(1, 10):
        known = plan_files(tmp_path)
        source.get(epoch)
        names += plan_files(tmp_path) - known
    assert plan_files(tmp_path) == set(names[-KEPT_PLANS:])
    assert first.numbers.tolist() == before
    assert source.get(0).plan.numbers.tolist() == before
    assert names[0] in plan_files(tmp_path)


def full_disk(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("obstacle", ["full disk", "others can write", "of another user"])
def test_where_plans_cannot_be_shared_each_process_computes_them(
    source: Epochs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, obstacle: str
) -> None:
    folder = tmp_path / f"epoch-plans-{os.geteuid()}"
    folder.mkdir(mode=0o700)
    if obstacle == "full disk":
        monkeypatch.setattr(os, "fsync", full_disk)
    elif obstacle == "others can write":
        folder.chmod(0o777)
    else:
        other = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: other)
        folder.rename(tmp_path / f"epoch-plans-{other}")
    assert np.array_equal(source.get(3).plan.numbers, source.compute(3).numbers)
    assert "cannot share epoch plans" in caplog.text
    assert {path.name for path in tmp_path.glob("*/*")} <= {"lock"}
