"""Division of a run's time into training steps and other phases."""

from collections import Counter

import torch

from pipeline.profiling.stopwatch import Stopwatch

STEP = ("data_wait", "compute", "between")
"""Phases of a step: waiting for the loader, the step itself, and the loop around them."""


class StepClock:
    """Measures the time of each phase.

    On a GPU, times are the GPU's own, and the host does not wait for the GPU until times are read. A loader that is
    slower than the host but not slower than the GPU therefore costs no time.
    """

    def __init__(self) -> None:
        self._watch: Stopwatch | None = None
        self._phase = ""
        self._since_lap: Counter[str] = Counter()
        self.counted_seconds = 0.0
        """Seconds in steps up to the last reading; a resumed run restores them from its checkpoint."""

    def start(self, device: torch.device) -> None:
        """Begin to measure."""
        self._watch = Stopwatch(device)
        self.begin("between")

    def begin(self, phase: str) -> None:
        """End the current phase and begin the next one."""
        if self._watch is not None:
            self._watch.begin(phase)
            self._phase = phase

    def read(self) -> None:
        """Update the sums; wait for the device."""
        if self._watch is not None:
            seconds = self._watch.read()
            self._since_lap.update(seconds)
            self.counted_seconds += sum(seconds.get(name, 0.0) for name in STEP)
            self.begin(self._phase)

    def lap(self) -> dict[str, float]:
        """Return the seconds in each phase of a step since the last call."""
        self.read()
        lap, self._since_lap = self._since_lap, Counter()
        return {name: lap.get(name, 0.0) for name in STEP}
