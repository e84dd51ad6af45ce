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
    assert clock.since_lap["compute"] == 1.0
    advance(1.0)
    assert clock.lap()["compute"] == 2.0
