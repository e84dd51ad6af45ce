"""The program of a job whose ranks are out of step, and log where they are.

SLOW_RANK sleeps after each step and validation batch, like a rank on a busy node. The sleep comes after the step's
collectives, so that the other ranks can be a whole step ahead. Other variables of the environment:

    SAVE_SECONDS   additional time to save a checkpoint
    CRASH_AFTER    SLOW_RANK fails in the step after this one
    HOLD           where it waits: see tests/integration/changed_program.py
"""

import sys

if sys.argv[1:2] == ["doctor"]:
    sys.exit()  # tested elsewhere; these jobs start often

from pipeline.__main__ import main  # isort: skip - it handles signals from here on

import os
import time
from collections.abc import Callable
from typing import Any

from pipeline.training import graceful_stop

SECONDS = 0.1
SAVE_SECONDS = float(os.environ.get("SAVE_SECONDS", "0.1"))
CRASH_AFTER = int(os.environ.get("CRASH_AFTER", "-1"))


def then_sleep(method: Callable[..., Any], moment: str) -> Any:
    """Return a method that logs a line, runs the given one, and sleeps."""

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
        graceful_stop.MARGIN_SECONDS = 2  # ranks on CPUs would wait half a minute longer
        from model.training_module import TranslationModule
        from pipeline.checkpointing.checkpoint_io import AtomicCheckpointIO
        from tests.integration import changed_program

        for owner, name, moment in (
            (TranslationModule, "training_step", "training"),
            (TranslationModule, "validation_step", "validation"),
            (AtomicCheckpointIO, "save_checkpoint", "save"),
        ):
            setattr(owner, name, then_sleep(getattr(owner, name), moment))
        if "HOLD" in os.environ:
            changed_program.hold()
    sys.exit(main())
