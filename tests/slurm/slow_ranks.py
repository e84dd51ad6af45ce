"""A Python that runs `-m pipeline` with ranks out of step, and says in the log where it is.

Real training but for SLOW_RANK's sleep after each step and validation batch, which stands for a busy node: it comes
after the step's collectives, so that others are by then up to a whole step ahead. Saving takes longer
than it would (SAVE_SECONDS), and the step after CRASH_AFTER fails on that rank. With DIES a rank is gone before it has
begun, with LINGERS it begins once it is asked to stop; LOCK_PATIENCE is how long it waits for another writer.
"""

import sys

if sys.argv[1:3] == ["-m", "pipeline"]:
    del sys.argv[1:3]  # as Python does
if sys.argv[1:2] == ["doctor"]:
    sys.exit()  # has tests of its own, and jobs here start often

from pipeline.__main__ import main  # isort: skip - it notes signals from here on

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from pipeline.runtime import signals
from pipeline.training import graceful_stop, start

SECONDS = 0.1
SAVE_SECONDS = float(os.environ.get("SAVE_SECONDS", "0.1"))
CRASH_AFTER = int(os.environ.get("CRASH_AFTER", "-1"))


def then_sleep(method: Callable[..., Any], moment: str) -> Any:
    """The method, and before it a line in the log, after it a sleep."""

    def replacement(*arguments: Any, **named: Any) -> Any:
        rank, slow = os.environ.get("SLURM_PROCID", "0"), os.environ.get("SLOW_RANK", "1")
        if rank == "0":
            print(f"MOMENT {moment}", file=sys.stderr, flush=True)
        if moment == "training" and rank == slow and arguments[0].global_step == CRASH_AFTER:
            raise ArithmeticError("a bug of this step")
        result = method(*arguments, **named)
        if moment == "save" or rank == slow:
            time.sleep(SAVE_SECONDS if moment == "save" else SECONDS)
        return result

    return replacement


if __name__ == "__main__":
    if sys.argv[1:2] == ["fit"]:
        print("MOMENT start", file=sys.stderr, flush=True)
        if os.environ.get("DIES") == "yes":
            os.kill(os.getpid(), signal.SIGSEGV)
        while os.environ.get("LINGERS") == "yes" and signals.first_signal() is None:
            time.sleep(0.1)
        graceful_stop.MARGIN_SECONDS = 2  # ranks on CPUs would wait half a minute longer
        start.LOCK_PATIENCE_SECONDS = int(os.environ.get("LOCK_PATIENCE", start.LOCK_PATIENCE_SECONDS))
        from model.translation_module import TranslationModule
        from pipeline.checkpointing.callback import AtomicCheckpointIO

        for owner, name, moment in (
            (TranslationModule, "training_step", "training"),
            (TranslationModule, "validation_step", "validation"),
            (AtomicCheckpointIO, "save_checkpoint", "save"),
        ):
            setattr(owner, name, then_sleep(getattr(owner, name), moment))
    sys.exit(main())
