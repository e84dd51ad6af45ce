"""Division of a run's time into training steps and other phases."""

import statistics
import time
from collections import deque
from itertools import pairwise
from typing import Any

import torch

OWN = ("data_wait", "compute", "loop_overhead")
"""Phases of a rank's own part of a step: waiting for the loader, the step itself, and the loop around them."""
STEP = (*OWN, "communication_wait")
"""Phases of a step: a rank's own part, and waiting for the other ranks and for the network."""

_RECENT_STEPS = 100
"""Number of recent steps whose median is returned."""
_ENOUGH_STEPS = 3
"""With fewer steps there is no median, because the first step after a start takes longer."""


class Stopwatch:
    """Measures the time of named phases, each of which lasts until the next one begins.

    On a GPU, phases are delimited by events on the GPU's own timeline, and the host does not wait for them before
    `read`. A phase in which the GPU waits for data or for the host includes that wait. Time by which the host runs
    ahead of the GPU does not count.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []  # Any: a time or an event

    def begin(self, phase: str) -> None:
        """End the current phase and begin the next one."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((phase, event))
        else:
            self._marks.append((phase, time.perf_counter()))

    def read(self) -> list[tuple[str, float]]:
        """Return name and seconds of all phases in order, and reset the stopwatch."""
        self.begin("")
        if self._on_gpu:
            torch.cuda.synchronize()
        marks, self._marks = self._marks, []
        return [
            (name, start.elapsed_time(end) / 1000.0 if self._on_gpu else end - start)
            for (name, start), (_, end) in pairwise(marks)
        ]


class StepClock:
    """Measures the time of each phase.

    On a GPU, times are the GPU's own, and the host does not wait for the GPU until times are read. A loader that is
    slower than the host but not slower than the GPU therefore costs no time.
    """

    def __init__(self) -> None:
        self._watch: Stopwatch | None = None
        self._phase = ""
        self._since_lap = dict.fromkeys(STEP, 0.0)
        self.counted_seconds = 0.0
        """Seconds in steps up to the last reading; a resumed run restores them from its checkpoint."""
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._unfinished = 0.0
        self._last_phase = ""

    def start(self, device: torch.device) -> None:
        """Begin to measure."""
        self._watch = Stopwatch(device)
        self.begin("loop_overhead")

    def begin(self, phase: str) -> None:
        """End the current phase and begin the next one."""
        if self._watch is not None:
            self._watch.begin(phase)
            self._phase = phase

    def read(self) -> None:
        """Update the sums; wait for the device."""
        if self._watch is not None:
            for name, seconds in self._watch.read():
                if name in STEP:
                    self._since_lap[name] += seconds
                    self.counted_seconds += seconds
                    self._count_step(name, seconds)
                self._last_phase = name
            self.begin(self._phase)

    def _count_step(self, phase: str, seconds: float) -> None:
        """Add a phase to the unfinished step. A step ends with its computation, which a reading may cut in two."""
        if phase == "loop_overhead" and self._last_phase == "compute":
            self._recent.append(self._unfinished)
            self._unfinished = 0.0
        self._unfinished += seconds

    def median_step_seconds(self) -> float | None:
        """Return the median seconds of the recent steps up to the last reading; None if they are too few."""
        return statistics.median(self._recent) if len(self._recent) >= _ENOUGH_STEPS else None

    def lap(self) -> dict[str, float]:
        """Return the seconds in each phase of a step since the last call."""
        self.read()
        lap, self._since_lap = self._since_lap, dict.fromkeys(STEP, 0.0)
        return lap
