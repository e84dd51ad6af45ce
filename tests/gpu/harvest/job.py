"""A stage's device, sizes, results and clock."""

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline.profiling.stopwatch import Stopwatch

CYCLES_PER_MILLISECOND = 2_000_000
"""Approximate clock rate of a GPU."""


def append(path: Path, stage: str, name: str, **values: Any) -> None:
    """Write one result."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"stage": stage, "name": name, **values}) + "\n")


@dataclass(frozen=True)
class Job:
    """A run of one stage."""

    stage: str
    output: Path
    device: torch.device
    tiny: bool = False
    """Use very small sizes and compile nothing, to check that the code runs."""

    def record(self, name: str, **values: Any) -> None:
        """Write one result."""
        append(self.output, self.stage, name, **values)

    def attempt(self, name: str, work: Callable[[], dict[str, Any]], **values: Any) -> None:
        """Record what `work` returns, or the reason if it raises."""
        try:
            found = work()
        except Exception as error:
            found = {"refused": f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"}
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        self.record(name, **values, **found)

    def milliseconds(
        self, work: Callable[[], Any], repeats: int = 20, warm_up: int = 3, head_start: float = 0.0
    ) -> float:
        """Return the median time of `work`, measured with GPU events on a GPU.

        `head_start`, in milliseconds, keeps the GPU busy while the host launches the work. If it is long enough for
        all launches, the result is the GPU's time even if the host is slower.
        """
        for _ in range(1 if self.tiny else warm_up):
            work()
        times = []
        stopwatch = Stopwatch(self.device)
        for _ in range(2 if self.tiny else repeats):
            if self.device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda._sleep(int(head_start * CYCLES_PER_MILLISECOND))
            stopwatch.begin("work")
            work()
            times += [1000 * seconds for _, seconds in stopwatch.read()]
        return statistics.median(times)


def per_second(amount: float, milliseconds: float) -> float | None:
    """Return a rate, or None if the measured time is 0."""
    return 1000 * amount / milliseconds if milliseconds > 0 else None
