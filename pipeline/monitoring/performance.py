"""How well training uses the machine: model FLOPs utilization, and ranks that are slower than the others.

Model FLOPs utilization (MFU) is the FLOPs that a step needs divided by those that the machine could do in the same
time. The machine's rate is measured with a large matrix product in the precision of training, not a vendor's figure.
"""

import statistics
import time

import numpy as np
import torch
from numpy.typing import NDArray

from data_module.corpus.store import ParallelCorpus
from model.settings import NetworkSettings

_MAX_PAIRS = 1_000_000
_MEASURE_SECONDS = 0.2
SLOW = 1.2
"""A rank is slow if its own part of a step takes this many times as long as that of the median rank."""
WINDOW_STEPS = 50
"""A slow rank is reported after two consecutive windows of at least this many steps: one window may contain a single
stall, such as the start of the run or a shared disk that does not respond."""


def flops_per_target_token(network: NetworkSettings, vocabulary_size: int, corpus: ParallelCorpus) -> float:
    """Return the FLOPs of forward and backward pass per target token, without padding.

    The number is an average over the first million pairs of the corpus, and counts only matrix products.
    """
    source, target = (store.lengths[:_MAX_PAIRS].astype(np.int64) + 1 for store in (corpus.source, corpus.target))
    return training_flops(network, vocabulary_size, source, target) / float(target.sum())


def matmul_rate(device: torch.device, precision: str) -> float:
    """Return the best rate of a large matrix product, in FLOP/s; 0 if a GPU has no memory left for the measurement.

    Other processes on the same cores slow it down, as they slow down training. `precision` is that of the Trainer.
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


def training_flops(
    network: NetworkSettings, vocabulary_size: int, source: NDArray[np.integer], target: NDArray[np.integer]
) -> float:
    """Return the FLOPs of the matrix products for sentence pairs, forward and backward, without padding.

    A product of [a, b] and [b, c] counts 2abc. With s and t the lengths of a pair, D d_model, F d_ff, K and V the total
    sizes of all heads' keys and values, N encoder layers, M decoder layers and P pieces, the forward pass of a pair
    needs

        N s (2 D (2K + V) + 2 V D + 4 D F) + N 2 s s (K + V)                      encoder
        M t (2 D (2K + V) + 2 V D + 4 D F) + M 2 t t (K + V)                      decoder
        M t (2 D K + 2 V D) + M s 2 D (K + V) + M 2 t s (K + V)                   cross-attention
        t 2 D P                                                                   output projection

    and the backward pass needs twice that, because each product has two factors. Causal attention counts as a full
    square. Embeddings (looked up, not multiplied), softmax, norms, dropout and additions are not counted.

    `source` and `target` are lengths [pairs].
    """
    s, t = source.astype(np.float64), target.astype(np.float64)
    width, inner = network.d_model, network.d_ff
    keys, values = network.num_heads * network.key_size, network.num_heads * network.value_size
    attention_and_feed_forward = 2 * width * (2 * keys + values) + 2 * values * width + 4 * width * inner
    encoder = s * attention_and_feed_forward + 2 * s * s * (keys + values)
    decoder = t * attention_and_feed_forward + 2 * t * t * (keys + values)
    cross = t * (2 * width * keys + 2 * values * width) + s * 2 * width * (keys + values) + 2 * t * s * (keys + values)
    layers = network.encoder_layers * encoder + network.decoder_layers * (decoder + cross)
    return 3.0 * float((layers + t * 2 * width * vocabulary_size).sum())


class MatrixProduct:
    """A square matrix product, large enough to reach the machine's best rate.

    The rate is measured repeatedly, alongside the work that it is compared with.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, size: int | None = None) -> None:
        self._on_gpu = device.type == "cuda"
        self._size = size or (8192 if self._on_gpu else 2048)
        # Its own generator: the global one belongs to training.
        generator = torch.Generator(device).manual_seed(0)
        self._left, self._right, self._product = (
            torch.randn(self._size, self._size, device=device, generator=generator).to(dtype) for _ in range(3)
        )
        self.rate()  # the first product is slow

    def rate(self) -> float:
        """Return the FLOP/s of one product; an addition and a multiplication count as two operations."""
        self._wait()
        start = time.perf_counter()
        torch.mm(self._left, self._right, out=self._product)
        self._wait()
        return 2.0 * self._size**3 / (time.perf_counter() - start)

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()


class Stragglers:
    """Compares the ranks' own step times, and reports each slow rank once.

    A rank's own time does not include waiting for other ranks: if it did, all ranks would take equally long.
    """

    def __init__(self, nodes: list[str]) -> None:
        self._nodes = nodes  # of each rank
        self._reported: set[int] = set()
        self._slow_before: set[int] = set()
        self._steps_before = self._steps = 0
        self._seconds = [0.0] * len(nodes)

    def add(self, step_seconds: list[float], steps: int) -> list[str]:
        """Add an interval of `steps`, with each rank's own mean seconds per step; return a line for each slow rank."""
        self._steps += steps
        self._seconds = [total + steps * own for total, own in zip(self._seconds, step_seconds, strict=True)]
        if self._steps < WINDOW_STEPS:
            return []
        median = statistics.median_low(self._seconds)
        slow = {rank for rank, seconds in enumerate(self._seconds) if seconds >= SLOW * median}
        to_report = sorted((slow & self._slow_before) - self._reported)
        self._reported.update(to_report)
        steps = self._steps_before + self._steps
        lines = [
            f"rank {rank} on {self._nodes[rank]} has been slow for {steps} steps, and the others wait for it: its own "
            f"part of a step takes {self._seconds[rank] / self._steps:.3g} s, "
            f"{100 * (self._seconds[rank] / median - 1):.0f} % more than the median rank's"
            for rank in to_report
        ]
        self._slow_before, self._steps_before = slow, self._steps
        self._steps, self._seconds = 0, [0.0] * len(self._nodes)
        return lines


def slowest_rank(step_seconds: list[float]) -> tuple[int, float]:
    """Return the rank that takes the longest, and its time over that of the median rank.

    The median of an even number of ranks is the faster one of the two in the middle.
    """
    rank = max(range(len(step_seconds)), key=step_seconds.__getitem__)
    return rank, step_seconds[rank] / statistics.median_low(step_seconds)
