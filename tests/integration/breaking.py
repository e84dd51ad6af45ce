"""`python -m pipeline` where one rank's loss is no number from step FIRST to step LAST.

FIRST and LAST are environment variables; it is the last rank's loss.
"""

import os
import sys

from data_module.batching.batch import MicroBatch
from model.loss import LossSums
from model.translation_module import TranslationModule
from pipeline.__main__ import main

sound_losses = TranslationModule.losses


def losses(module: TranslationModule, batch: MicroBatch) -> LossSums:
    sums = sound_losses(module, batch)
    is_hit = int(os.environ["FIRST"]) <= module.global_step + 1 <= int(os.environ["LAST"])
    if module.training and is_hit and module.global_rank == module.trainer.world_size - 1:
        return sums._replace(smoothed=sums.smoothed * float("nan"))
    return sums


if __name__ == "__main__":
    TranslationModule.losses = losses  # type: ignore[method-assign]
    sys.exit(main())
