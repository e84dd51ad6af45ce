"""Where time goes: phases of a step, and other phases."""

import time

import torch

from pipeline.profiling.step_clock import StepClock


def test_phases_add_up_and_others_do_not_count() -> None:
    clock = StepClock()
    clock.begin("before it starts")
    clock.read()
    assert clock.counted_seconds == 0.0
    began = time.perf_counter()
    clock.start(torch.device("cpu"))
    for _ in range(2):
        for phase, seconds in (("data_wait", 0.01), ("compute", 0.02), ("checkpoint", 0.03), ("between", 0.005)):
            clock.begin(phase)
            time.sleep(seconds)
    clock.counted_seconds += 100.0  # of earlier processes
    lap = clock.lap()
    whole = time.perf_counter() - began
    assert set(lap) == {"data_wait", "compute", "between"}
    assert lap["data_wait"] >= 0.02
    assert lap["compute"] >= 0.04
    assert lap["between"] >= 0.01
    assert sum(lap.values()) <= whole - 0.06
    assert clock.counted_seconds == 100.0 + sum(lap.values())
    # A reading in the middle of a phase loses nothing of it.
    clock.begin("compute")
    time.sleep(0.01)
    clock.read()
    time.sleep(0.01)
    assert clock.lap()["compute"] >= 0.02
