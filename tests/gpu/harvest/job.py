"""What a stage is given: a device, sizes, a place for its results, and a clock."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.gpu.harvest.results import Results

CYCLES_PER_MILLISECOND = 2_000_000
"""Of a GPU's clock, about."""


@dataclass(frozen=True)
class Job:
    """One stage's run."""

    stage: str
    results: Results
    device: torch.device
    tiny: bool = False
    """Sizes that take no time, and nothing compiled: to see that the code runs."""

    def record(self, name: str, **values: Any) -> None:
        """Write one result."""
        self.results.append(self.stage, name, **values)

    def attempt(self, name: str, work: Callable[[], dict[str, Any]], **values: Any) -> None:
        """Record what `work` returns; where it raises, record why and go on with the next."""
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
        """Median time of `work`; on a GPU by its own clock.

        With a `head_start`, in milliseconds, the GPU is kept busy for so long while the host launches the work: the
        time is then the GPU's alone, also where the host is slower, if that is long enough for all launches.
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
    """A rate; None where the clock shows no time."""
    return 1000 * amount / milliseconds if milliseconds > 0 else None
