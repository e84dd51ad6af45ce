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

    def __init__(self, first_step: int, last_step: int, steps_between_validations: int | None) -> None:
        """Start at `first_step`; `steps_between_validations` is None for training without validation."""
        self._step = first_step
        self._last = last_step
        self._between_validations = steps_between_validations
        self.validation_seconds: float | None = None
        """Seconds of the last validation; None before the first one of a run."""
        self._next_line = 0.0
        self._metrics: dict[str, str] = {}
        self._bar: tqdm[Any] | None = None
        if sys.stderr.isatty():
            self._bar = tqdm(
                total=last_step,
                initial=first_step,
                desc="training",
                unit="step",
                # Without tqdm's own time left, for which a validation is a slow step.
                bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]",
                file=sys.stderr,
                mininterval=0.5,
                dynamic_ncols=True,
            )
        else:
            say(f"training: from step {first_step:,} to {last_step:,}")

    def advance(self) -> None:
        """Count one step."""
        self._step += 1
        if self._bar is not None:
            self._bar.update(1)

    def announce(self, seconds_per_step: float) -> None:
        """Print how long the rest of the run will take."""
        steps, validations = self._last - self._step, self._validations_left()
        if steps < 1:
            return
        known = "without" if self.validation_seconds is None else "with"
        also = f", {known} {validations:,} validation{'s' if validations > 1 else ''}" if validations else ""
        left = _duration(self._seconds_left(seconds_per_step))
        say(f"training: {steps:,} steps of {seconds_per_step:.2g} s take about {left}{also}")

    def show(self, metrics: dict[str, str], seconds_per_step: float | None = None) -> None:
        """Show new values; metrics that are not among them keep their last values.

        Args:
            metrics: values by name.
            seconds_per_step: for the time left, which is not shown if this is None.
        """
        self._metrics |= metrics
        left = None if seconds_per_step is None else _duration(self._seconds_left(seconds_per_step))
        if self._bar is not None:
            if left is not None:
                self._metrics |= {"left": left}
            self._bar.set_postfix(self._metrics, refresh=False)
        elif time.monotonic() >= self._next_line or self._step >= self._last:
            self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES
            values = [f"{name} {value}" for name, value in self._metrics.items()]
            values += [] if left is None else [f"{left} left"]
            say(f"training: step {self._step:,} of {self._last:,}: {', '.join(values)}")

    def _validations_left(self) -> int:
        every = self._between_validations
        return 0 if every is None else self._last // every - self._step // every

    def _seconds_left(self, seconds_per_step: float) -> float:
        validations = self._validations_left() * (self.validation_seconds or 0.0)
        return (self._last - self._step) * seconds_per_step + validations

    def close(self) -> None:
        """Stop updating the bar, and leave it on the screen."""
        if self._bar is not None:
            self._bar.close()


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
