"""Division of a run's time into training steps and other phases."""

import time
from itertools import pairwise
from typing import Any

import torch

OWN = ("data_wait", "compute", "loop_overhead")
"""Phases of a rank's own part of a step: waiting for the loader, the step itself, and the loop around them."""
STEP = (*OWN, "communication_wait")
"""Phases of a step: a rank's own part, and waiting for the other ranks and for the network."""


class StepClock:
    """Measures the time of phases, each of which lasts until the next one begins.

    On a GPU, phases are delimited by events on the GPU's own timeline, and the host does not wait for them before
    `read`. A phase in which the GPU waits for data or for the host includes that wait. Time by which the host runs
    ahead of the GPU does not count: a loader that is slower than the host but not slower than the GPU costs no time.
    """

    def __init__(self) -> None:
        self._on_gpu: bool | None = None
        """None before `start`: until then, no time is measured."""
        self._marks: list[tuple[str, Any]] = []
        """Phases that began since the last reading, and when: a time, or an event."""
        self.since_lap = dict.fromkeys(STEP, 0.0)
        """Seconds in each phase of a step since the last lap, up to the last reading."""
        self.counted_seconds = 0.0
        """Seconds in steps up to the last reading; a resumed run restores them from its checkpoint."""

    def start(self, device: torch.device) -> None:
        """Begin to measure."""
        self._on_gpu, self._marks = device.type == "cuda", []
        self.begin("loop_overhead")

    def begin(self, phase: str) -> None:
        """End the current phase and begin the next one."""
        if self._on_gpu is None:
            return
        mark: Any = torch.cuda.Event(enable_timing=True) if self._on_gpu else time.perf_counter()
        if self._on_gpu:
            mark.record()
        self._marks.append((phase, mark))

    def read(self) -> None:
        """Update the sums; wait for the device."""
        if not self._marks:
            return
        self.begin(self._marks[-1][0])
        if self._on_gpu:
            torch.cuda.synchronize()
        marks, self._marks = self._marks, self._marks[-1:]
        for (phase, start), (_, end) in pairwise(marks):
            seconds = start.elapsed_time(end) / 1000.0 if self._on_gpu else end - start
            if phase in STEP:
                self.since_lap[phase] += seconds
                self.counted_seconds += seconds

    def lap(self) -> dict[str, float]:
        """Return the seconds in each phase of a step since the last call."""
        self.read()
        lap, self.since_lap = self.since_lap, dict.fromkeys(STEP, 0.0)
        return lap
