"""Where time goes: phases of a step, and other phases."""

import time
from collections.abc import Callable

import pytest
import torch

from pipeline.runtime.step_clock import StepClock

Advance = Callable[[float], None]


@pytest.fixture
def advance(monkeypatch: pytest.MonkeyPatch) -> Advance:
    """A function that lets seconds pass."""
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)

    def advance(seconds: float) -> None:
        nonlocal now
        now += seconds

    return advance


def test_phases_add_up_and_others_do_not_count(advance: Advance) -> None:
    clock = StepClock()
    clock.begin("before it starts")
    advance(9.0)
    clock.read()
    assert clock.counted_seconds == 0.0
    clock.start(torch.device("cpu"))
    phases = {"data_wait": 1.0, "compute": 2.0, "communication_wait": 0.5, "checkpoint": 3.0, "loop_overhead": 0.25}
    for _ in range(2):
        for phase, seconds in phases.items():
            clock.begin(phase)
            advance(seconds)
    clock.counted_seconds += 100.0  # of earlier processes
    assert clock.lap() == {"data_wait": 2.0, "compute": 4.0, "communication_wait": 1.0, "loop_overhead": 0.5}
    assert clock.counted_seconds == 107.5
    # A reading in the middle of a phase loses nothing of it.
    clock.begin("compute")
    advance(1.0)
    clock.read()
    advance(1.0)
    assert clock.lap()["compute"] == 2.0


def test_the_median_step_is_that_of_the_last_steps(advance: Advance) -> None:
    clock = StepClock()
    clock.start(torch.device("cpu"))

    def take(seconds: float, read: str = "") -> None:
        """A step of which a tenth is waiting for data; `read` names a phase that a reading cuts in two."""
        for phase, part in (("data_wait", 0.1), ("compute", 0.5), ("communication_wait", 0.3), ("compute", 0.1)):
            clock.begin(phase)
            advance(seconds * part / 2)
            if read == phase:
                clock.read()
            advance(seconds * part / 2)
        clock.begin("loop_overhead")

    take(500.0)
    take(2.0)
    clock.read()
    assert clock.median_step_seconds() is None  # The first step of a start is slow: two do not tell.
    take(4.0, read="data_wait")
    clock.begin("validation")
    advance(1000.0)
    clock.begin("loop_overhead")
    take(6.0, read="compute")
    clock.read()
    assert clock.median_step_seconds() == pytest.approx(5.0)  # of 500, 2, 4 and 6
    for seconds, count in ((3.0, 200), (9.0, 60)):  # more than half of the last hundred
        for _ in range(count):
            take(seconds)
        clock.read()
        assert clock.median_step_seconds() == pytest.approx(seconds)
    assert clock.counted_seconds == pytest.approx(512.0 + 600.0 + 540.0)
