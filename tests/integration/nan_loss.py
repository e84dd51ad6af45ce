"""Run `python -m pipeline` with a NaN loss on the last rank from step FIRST_STEP to step LAST_STEP.

FIRST_STEP and LAST_STEP are environment variables.
"""

import os
import sys

from torch import Tensor

from data_module.batching.batch import PackedBatch, PaddedBatch
from model.loss import LossSums
from model.training_module import TranslationModule
from pipeline.__main__ import main

original_losses = TranslationModule.losses


def losses(
    module: TranslationModule, batch: PackedBatch | PaddedBatch, scale: Tensor | float | None = None
) -> LossSums:
    is_affected = int(os.environ["FIRST_STEP"]) <= module.global_step + 1 <= int(os.environ["LAST_STEP"])
    if module.training and is_affected and module.global_rank == module.trainer.world_size - 1:
        scale = float("nan")
    return original_losses(module, batch, scale)


if __name__ == "__main__":
    TranslationModule.losses = losses  # type: ignore[method-assign]
    sys.exit(main())
