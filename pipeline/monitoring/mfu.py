"""Model FLOPs utilization (MFU): the FLOPs that a step needs over what the machine could do in the same time.

The machine's rate is not a vendor's figure: it is measured with a large matrix product in the precision of training.
"""

import time

import numpy as np
import torch

from data_module.corpus.store import ParallelCorpus
from model.settings import NetworkSettings
from pipeline.profiling.flops import training_flops
from pipeline.profiling.machine import MatrixProduct

_MAX_PAIRS = 1_000_000
_MEASURE_SECONDS = 0.2


def flops_per_target_token(network: NetworkSettings, vocabulary_size: int, corpus: ParallelCorpus) -> float:
    """Return the FLOPs of forward and backward pass per target token, without padding.

    They are an average over the first million pairs of the corpus, and count matrix products only.
    """
    source, target = (store.lengths[:_MAX_PAIRS].astype(np.int64) + 1 for store in (corpus.source, corpus.target))
    return training_flops(network, vocabulary_size, source, target) / float(target.sum())


def matmul_rate(device: torch.device, precision: str) -> float:
    """Measure the rate of a large matrix product, for a fraction of a second.

    Other processes on the same cores slow it down, as they slow down training.

    Args:
        device: where the model is trained.
        precision: `trainer.precision`.

    Returns:
        The best rate in FLOP/s; 0 if a GPU has no memory left for the measurement.
    """
    dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision, torch.float32)
    try:
        product = MatrixProduct(device, dtype, size=None if device.type == "cuda" else 1024)
    except torch.cuda.OutOfMemoryError:
        return 0.0
    best, deadline = 0.0, time.monotonic() + _MEASURE_SECONDS
    while not best or time.monotonic() < deadline:
        best = max(best, product.rate())
    return best
