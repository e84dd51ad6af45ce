"""Where time goes: phases of a step, and other phases."""

import time

import pytest
import torch

from pipeline.runtime.step_clock import StepClock


def test_phases_add_up_and_others_do_not_count() -> None:
    clock = StepClock()
    clock.begin("before it starts")
    clock.read()
    assert clock.counted_seconds == 0.0
    began = time.perf_counter()
    clock.start(torch.device("cpu"))
    for _ in range(2):
        for phase, seconds in (
            ("data_wait", 0.01),
            ("compute", 0.02),
            ("communication_wait", 0.01),
            ("checkpoint", 0.03),
            ("loop_overhead", 0.005),
        ):
            clock.begin(phase)
            time.sleep(seconds)
    clock.counted_seconds += 100.0  # of earlier processes
    lap = clock.lap()
    whole = time.perf_counter() - began
    assert set(lap) == {"data_wait", "compute", "communication_wait", "loop_overhead"}
    assert lap["data_wait"] >= 0.02
    assert lap["compute"] >= 0.04
    assert lap["communication_wait"] >= 0.02
    assert lap["loop_overhead"] >= 0.01
    assert sum(lap.values()) <= whole - 0.06
    assert clock.counted_seconds == 100.0 + sum(lap.values())
    # A reading in the middle of a phase loses nothing of it.
    clock.begin("compute")
    time.sleep(0.01)
    clock.read()
    time.sleep(0.01)
    assert clock.lap()["compute"] >= 0.02


def test_the_median_step_is_that_of_the_last_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = StepClock()
    clock.start(torch.device("cpu"))

    def take(seconds: float, read: str = "") -> None:
        """A step of which a tenth is waiting for data; `read` names a phase that a reading cuts in two."""
        nonlocal now
        for phase, part in (("data_wait", 0.1), ("compute", 0.5), ("communication_wait", 0.3), ("compute", 0.1)):
            clock.begin(phase)
            now += seconds * part / 2
            if read == phase:
                clock.read()
            now += seconds * part / 2
        clock.begin("loop_overhead")

    take(500.0)
    take(2.0)
    clock.read()
    assert clock.median_step_seconds() is None  # The first step of a start is slow: two do not tell.
    take(4.0, read="data_wait")
    clock.begin("validation")
    now += 1000.0
    clock.begin("loop_overhead")
    take(6.0, read="compute")
    clock.read()
    assert clock.median_step_seconds() == pytest.approx(5.0)  # of 500, 2, 4 and 6
    for _ in range(200):
        take(3.0)
    clock.read()
    assert clock.median_step_seconds() == pytest.approx(3.0)
    for _ in range(60):  # more than half of the last hundred
        take(9.0)
    clock.read()
    assert clock.median_step_seconds() == pytest.approx(9.0)
    assert clock.counted_seconds == pytest.approx(512.0 + 600.0 + 540.0)
