"""A Python that runs `-m pipeline` with ranks out of step, and says in the log where it is.

Real training but for SLOW_RANK's sleep after each step and validation batch, which stands for a busy node: it comes
after the step's collectives, so that others are by then up to a whole step ahead. Saving takes longer than it would.
"""

import sys

if sys.argv[1:3] == ["-m", "pipeline"]:
    del sys.argv[1:3]  # as Python does

from pipeline.__main__ import main  # isort: skip - it notes signals from here on

import os
import time
from collections.abc import Callable
from typing import Any

SECONDS = float(os.environ.get("SLEEP_SECONDS", "0.1"))


def then_sleep(method: Callable[..., Any], *, only: str | None = None, moment: str | None = None) -> Any:
    """The method, and before it a line in the log, after it a sleep."""

    def replacement(*arguments: Any, **named: Any) -> Any:
        rank = os.environ.get("SLURM_PROCID", "0")
        if moment is not None and rank == "0":
            print(f"MOMENT {moment}", file=sys.stderr, flush=True)
        result = method(*arguments, **named)
        if only is None or rank == only:
            time.sleep(SECONDS)
        return result

    return replacement


if __name__ == "__main__":
    if sys.argv[1:2] == ["fit"]:
        print("MOMENT start", file=sys.stderr, flush=True)
        from model.translation_module import TranslationModule
        from pipeline.callbacks import WholeCheckpointIO

        slow = os.environ.get("SLOW_RANK", "1")
        for owner, name, moment in (
            (TranslationModule, "training_step", "training"),
            (TranslationModule, "validation_step", "validation"),
        ):
            setattr(owner, name, then_sleep(getattr(owner, name), only=slow, moment=moment))
        WholeCheckpointIO.save_checkpoint = then_sleep(  # type: ignore[method-assign]
            WholeCheckpointIO.save_checkpoint, moment="save"
        )
    sys.exit(main())
