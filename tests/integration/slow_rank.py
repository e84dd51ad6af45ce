"""Run `python -m pipeline` with a slow rank: `python -m tests.integration.slow_rank fit ...`.

Every rank sleeps in each step, as if it computed. SLOW_RANK, a variable of the environment, also sleeps before its
forward pass, and again in the loop after the step: before and after it communicates with the other ranks.
"""

import os
import sys
import time
from typing import Any

from data_module.batching.batch import RankBatch
from model.training_module import TranslationModule
from pipeline.__main__ import main

ALL_SECONDS, SLOW_SECONDS = 0.05, 0.05
original_cast_weights = TranslationModule.cast_weights


def is_slow(module: TranslationModule) -> bool:
    return module.global_rank == int(os.environ["SLOW_RANK"])


def sleep_first(module: TranslationModule) -> None:
    time.sleep(ALL_SECONDS + SLOW_SECONDS * is_slow(module))
    original_cast_weights(module)


def sleep_last(module: TranslationModule, outputs: dict[str, Any], batch: RankBatch, batch_idx: int) -> None:
    time.sleep(SLOW_SECONDS * is_slow(module))


if __name__ == "__main__":
    TranslationModule.cast_weights = sleep_first  # type: ignore[method-assign]
    TranslationModule.on_train_batch_end = sleep_last  # type: ignore[assignment, method-assign]
    sys.exit(main())
