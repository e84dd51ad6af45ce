"""`python -m pipeline` that also counts what ranks say to each other: `python -m tests.integration.collectives fit`.

COUNTS names a folder. Each rank leaves a file of JSON there: how often each collective ran during NUM_STEPS steps,
and how often one was called from Python, by the type of its tensor. Gradients travel without Python's help.
"""

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import profile

from data_module.batching.batch import RankBatch
from model.translation_module import TranslationModule
from pipeline.__main__ import main

FIRST, NUM_STEPS = 3, 6
"""From the third on, when DDP has laid out its buckets; between two logs."""
train = TranslationModule.training_step
all_reduce = dist.all_reduce
counting = profile(activities=[torch.profiler.ProfilerActivity.CPU])
called: Counter[str] = Counter()
posted: list[dist.Work] = []


def count_and_train(module: TranslationModule, share: RankBatch, batch_idx: int) -> dict[str, Any]:
    if module.global_step in (FIRST, FIRST + NUM_STEPS):
        posted[-1].wait()  # for nobody else does, and it counts when it has ended
    if module.global_step == FIRST:
        counting.start()
        called.clear()
    if module.global_step == FIRST + NUM_STEPS:
        counting.stop()
        found = Counter(event.name for event in counting.events() if event.name.startswith(("gloo:", "nccl:")))
        counts = {"ran": found, "called": called}
        (Path(os.environ["COUNTS"]) / f"{module.global_rank}.json").write_text(json.dumps(counts))
    return train(module, share, batch_idx)


def count_and_reduce(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
    called[str(tensor.dtype)] += 1
    work = all_reduce(tensor, *arguments, **options)
    if work is not None:
        posted.append(work)
    return work


if __name__ == "__main__":
    TranslationModule.training_step = count_and_train  # type: ignore[method-assign]
    dist.all_reduce = count_and_reduce
    sys.exit(main())
