"""A stage's device, sizes, results and clock."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.gpu.harvest.results import Results

CYCLES_PER_MILLISECOND = 2_000_000
"""Approximate clock rate of a GPU."""


@dataclass(frozen=True)
class Job:
    """A run of one stage."""

    stage: str
    results: Results
    device: torch.device
    tiny: bool = False
    """Use very small sizes and compile nothing, to check that the code runs."""

    def record(self, name: str, **values: Any) -> None:
        """Write one result."""
        self.results.append(self.stage, name, **values)

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
        times = [self._once(work, head_start) for _ in range(2 if self.tiny else repeats)]
        return statistics.median(times)

    def _once(self, work: Callable[[], Any], head_start: float) -> float:
        if self.device.type != "cuda":
            start = time.perf_counter()
            work()
            return 1000 * (time.perf_counter() - start)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        if head_start:
            torch.cuda._sleep(int(head_start * CYCLES_PER_MILLISECOND))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)


def per_second(amount: float, milliseconds: float) -> float | None:
    """Return a rate, or None if the measured time is 0."""
    return 1000 * amount / milliseconds if milliseconds > 0 else None
