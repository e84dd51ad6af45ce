"""How much of the machine's arithmetic training uses: what a token needs, and what the machine can do at most."""

import time

import numpy as np
import torch

from data_module.corpus.store import ParallelCorpus
from model.settings import NetworkSettings
from pipeline.profiling.flops import training_flops
from pipeline.profiling.machine import MatrixProduct

_PAIRS_LOOKED_AT = 1_000_000
_SECONDS = 0.2


def flops_per_target_token(network: NetworkSettings, vocabulary_size: int, corpus: ParallelCorpus) -> float:
    """Of the matrix products that the corpus's real tokens need, forward and backward; over its first pairs at most."""
    source, target = (store.lengths[:_PAIRS_LOOKED_AT].astype(np.int64) + 1 for store in (corpus.source, corpus.target))
    return training_flops(network, vocabulary_size, source, target) / float(target.sum())


def best_rate(device: torch.device, precision: str) -> float:
    """FLOP/s of this process's best large matrix product, at the precision trained in; takes a fraction of a second.

    0 where a GPU has no memory left for it.

    Other processes on the same cores take their part of it, as they do of training.
    """
    dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision, torch.float32)
    try:
        product = MatrixProduct(device, dtype, size=None if device.type == "cuda" else 1024)
    except torch.cuda.OutOfMemoryError:
        return 0.0  # training needs the memory more
    best, deadline = 0.0, time.monotonic() + _SECONDS
    while not best or time.monotonic() < deadline:
        best = max(best, product.rate())
    return best
