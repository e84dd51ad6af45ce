"""Run `python -m pipeline` and count collectives: `python -m tests.integration.count_collectives fit ...`.

Each rank writes `RANK.json` to the folder in the environment variable COUNTS. It holds the number of collectives that
ran during NUM_STEPS steps, by name, and the number of all-reduces called from Python, by data type. DDP reduces
gradients without calling Python.
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
from model.training_module import TranslationModule
from pipeline.__main__ import main

FIRST_STEP, NUM_STEPS = 3, 6
"""DDP has built its final buckets by the first of these steps; none of them is logged."""
original_training_step = TranslationModule.training_step
original_all_reduce = dist.all_reduce
profiler = profile(activities=[torch.profiler.ProfilerActivity.CPU])
called_by_dtype: Counter[str] = Counter()
pending_works: list[dist.Work] = []


def count_and_train(module: TranslationModule, batch: RankBatch, batch_idx: int) -> dict[str, Any]:
    if module.global_step in (FIRST_STEP, FIRST_STEP + NUM_STEPS):
        pending_works[-1].wait()  # nothing else waits for it, and it is counted when it ends
    if module.global_step == FIRST_STEP:
        profiler.start()
        called_by_dtype.clear()
    if module.global_step == FIRST_STEP + NUM_STEPS:
        profiler.stop()
        num_run = Counter(event.name for event in profiler.events() if event.name.startswith(("gloo:", "nccl:")))
        counts = {"ran": num_run, "called": called_by_dtype}
        (Path(os.environ["COUNTS"]) / f"{module.global_rank}.json").write_text(json.dumps(counts))
    return original_training_step(module, batch, batch_idx)


def count_and_reduce(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
    called_by_dtype[str(tensor.dtype)] += 1
    work = original_all_reduce(tensor, *arguments, **options)
    if work is not None:
        pending_works.append(work)
    return work


if __name__ == "__main__":
    TranslationModule.training_step = count_and_train  # type: ignore[method-assign]
    dist.all_reduce = count_and_reduce
    sys.exit(main())
