"""`python -m pipeline` that also notes which pairs each rank trains on: `python -m tests.integration.recording fit`.

The notes go to the folder NOTES names, a file a process, a line of JSON a step.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from data_module.batching.batch import RankBatch
from model.translation_module import TranslationModule
from pipeline.__main__ import main

train = TranslationModule.training_step


def note_and_train(module: TranslationModule, share: RankBatch, batch_idx: int) -> dict[str, Any]:
    pairs = [] if share.is_filler else [pair for batch in share.micro_batches for pair in batch.pairs.tolist()]
    note = {"step": module.global_step + 1, "ranks": module.trainer.world_size, "rank": module.global_rank}
    with (Path(os.environ["NOTES"]) / f"{os.getpid()}").open("a") as file:
        print(json.dumps({**note, "epoch": share.epoch, "index": share.index, "pairs": pairs}), file=file)
    return train(module, share, batch_idx)


if __name__ == "__main__":
    TranslationModule.training_step = note_and_train  # type: ignore[method-assign]
    sys.exit(main())
