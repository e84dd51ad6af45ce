"""Training progress in the terminal: a progress bar, or a line per minute if standard error is not a terminal."""

import sys
import time
from datetime import timedelta
from typing import Any

from tqdm import tqdm

from pipeline.runtime.console import say

SECONDS_BETWEEN_LINES = 60.0


class Progress:
    """Shows the step, metrics and the time left on standard error."""

    def __init__(self, first_step: int, last_step: int) -> None:
        self._step = self._first = first_step
        self._last = last_step
        self._start = 0.0
        self._next_line = 0.0
        self._metrics: dict[str, str] = {}
        self._bar: tqdm[Any] | None = None
        if sys.stderr.isatty():
            self._bar = tqdm(
                total=last_step,
                initial=first_step,
                desc="training",
                unit="step",
                file=sys.stderr,
                mininterval=0.5,
                dynamic_ncols=True,
            )
        else:
            say(f"training: from step {first_step:,} to {last_step:,}")

    def advance(self) -> None:
        """Count one step; the time left is estimated from the steps after the first one."""
        self._step += 1
        if self._step == self._first + 1:
            self._start = time.monotonic()
        if self._bar is not None:
            self._bar.update(1)

    def show(self, metrics: dict[str, str]) -> None:
        """Show new values; metrics that are not among them keep their last values."""
        self._metrics |= metrics
        if self._bar is not None:
            self._bar.set_postfix(self._metrics, refresh=False)
        elif time.monotonic() >= self._next_line or self._step >= self._last:
            self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES
            values = ", ".join(f"{name} {value}" for name, value in self._metrics.items())
            say(f"training: step {self._step:,} of {self._last:,}: {values}{self._time_left()}")

    def _time_left(self) -> str:
        timed = self._step - self._first - 1
        if timed < 1:
            return ""
        seconds_per_step = (time.monotonic() - self._start) / timed
        return f", {timedelta(seconds=round(seconds_per_step * (self._last - self._step)))} left"

    def close(self) -> None:
        """Stop updating the bar, and leave it on the screen."""
        if self._bar is not None:
            self._bar.close()
