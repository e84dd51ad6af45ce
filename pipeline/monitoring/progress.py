"""What the terminal shows of training: a bar; where there is no terminal, a line now and then."""

import sys
import time
from datetime import timedelta
from typing import Any

from tqdm import tqdm

from pipeline.runtime.console import say

SECONDS_BETWEEN_LINES = 60.0


class Progress:
    """Loss, BLEU, speed and time left on standard error."""

    def __init__(self, first: int, last: int) -> None:
        """From one step to another."""
        self._step = self._first = first
        self._last = last
        self._began = time.monotonic()
        self._next_line = 0.0
        self._shown: dict[str, str] = {}
        self._bar: tqdm[Any] | None = None
        if sys.stderr.isatty():
            self._bar = tqdm(
                total=last,
                initial=first,
                desc="training",
                unit="step",
                file=sys.stderr,
                mininterval=0.5,
                dynamic_ncols=True,
            )
        else:
            say(f"training: from step {first:,} to {last:,}")

    def advance(self) -> None:
        """One step was taken."""
        self._step += 1
        if self._bar is not None:
            self._bar.update(1)

    def show(self, numbers: dict[str, str]) -> None:
        """Newer values of what is shown; of those named before and not now, the last ones stay."""
        self._shown |= numbers
        if self._bar is not None:
            self._bar.set_postfix(self._shown, refresh=False)
        elif time.monotonic() >= self._next_line or self._step >= self._last:
            self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES
            numbers_shown = ", ".join(f"{name} {value}" for name, value in self._shown.items())
            left = (time.monotonic() - self._began) / max(self._step - self._first, 1) * (self._last - self._step)
            say(f"training: step {self._step:,} of {self._last:,}: {numbers_shown}, {_duration(left)} left")

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
