"""Where a run's time goes: into steps, or into what stands beside them."""

from collections import Counter

import torch

from pipeline.profiling.stopwatch import Stopwatch

STEP = ("data_wait", "compute", "between")
"""Stretches that make up a step: waiting for the loader, the step itself, and the loop around them."""


class StepClock:
    """Cuts time into stretches by name, and adds them up.

    On a GPU the time is the GPU's own, and nobody waits for it until it is read: a host that runs ahead, or a loader
    that is slower than it but not than the GPU, costs nothing.
    """

    def __init__(self) -> None:
        self._watch: Stopwatch | None = None
        self._split_evenly = ""
        self._since_lap: Counter[str] = Counter()
        self.counted_seconds = 0.0
        """In steps, up to the last reading; a run that goes on sets what its checkpoint says."""

    def start(self, device: torch.device) -> None:
        """Time counts from here on."""
        self._watch = Stopwatch(device)
        self.begin("between")

    def begin(self, stretch: str) -> None:
        """The last stretch ends here."""
        if self._watch is not None:
            self._watch.begin(stretch)
            self._split_evenly = stretch

    def read(self) -> None:
        """Bring sums up to date; waits for the device."""
        if self._watch is not None:
            seconds = self._watch.read()
            self._since_lap.update(seconds)
            self.counted_seconds += sum(seconds.get(name, 0.0) for name in STEP)
            self.begin(self._split_evenly)

    def lap(self) -> dict[str, float]:
        """Seconds in each of a step's stretches since the last lap."""
        self.read()
        lap, self._since_lap = self._since_lap, Counter()
        return {name: lap.get(name, 0.0) for name in STEP}
