"""Run `python -m pipeline` and record the pairs of each step: `python -m tests.integration.record_batches fit ...`.

Each process writes one file to the folder in the environment variable RECORDS, with one line of JSON per step.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from data_module.batching.batch import RankBatch
from model.training_module import TranslationModule
from pipeline.__main__ import main

original_training_step = TranslationModule.training_step


def record_and_train(module: TranslationModule, batch: RankBatch, batch_idx: int) -> dict[str, Any]:
    pairs = batch.pairs.tolist()
    record = {"step": module.global_step + 1, "ranks": module.trainer.world_size, "rank": module.global_rank}
    with (Path(os.environ["RECORDS"]) / f"{os.getpid()}").open("a") as file:
        print(json.dumps({**record, "epoch": batch.epoch, "index": batch.index, "pairs": pairs}), file=file)
    return original_training_step(module, batch, batch_idx)


if __name__ == "__main__":
    TranslationModule.training_step = record_and_train  # type: ignore[method-assign]
    sys.exit(main())
