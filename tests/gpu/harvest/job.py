"""A stage's device, sizes, results and clock; and synthetic batches of the paper's size."""

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from data_module.batching.batch import RankBatch, SpecialIds, collate
from data_module.batching.rank_rows import rank_rows, row_shape
from data_module.corpus.store import ParallelCorpus
from pipeline.runtime.step_clock import Stopwatch

CYCLES_PER_MILLISECOND = 2_000_000
"""Approximate clock rate of a GPU."""
SPECIAL = SpecialIds(pad=0, bos=2, eos=3)
PIECES, STEP_TOKENS, MEAN_LENGTH, LONGEST = 37_000, 25_000, 27, 120
NUM_STEPS = 4


def append(path: Path, stage: str, name: str, **values: Any) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"stage": stage, "name": name, **values}) + "\n")


@dataclass(frozen=True)
class Job:
    stage: str
    output: Path
    device: torch.device
    tiny: bool = False
    """Use very small sizes and compile nothing, to check that the code runs."""

    def record(self, name: str, **values: Any) -> None:
        append(self.output, self.stage, name, **values)

    def attempt(self, name: str, work: Callable[[], dict[str, Any]], **values: Any) -> None:
        """Record what `work` returns, or the reason if it raises."""
        try:
            found = work()
        except Exception as error:
            found = {"refused": f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"}
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        self.record(name, **values, **found)

    def milliseconds(
        self, work: Callable[[], Any], repeats: int = 20, warm_up: int = 3, head_start: float = 0.0
    ) -> float:
        """Return the median time of `work`, measured with GPU events on a GPU.

        `head_start`, in milliseconds, keeps the GPU busy while the host launches the work. If it is long enough for
        all launches, the result is the GPU's time even if the host is slower.
        """
        for _ in range(1 if self.tiny else warm_up):
            work()
        times = []
        stopwatch = Stopwatch(self.device)
        for _ in range(2 if self.tiny else repeats):
            if self.device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda._sleep(int(head_start * CYCLES_PER_MILLISECOND))
            stopwatch.begin("work")
            work()
            times += [1000 * seconds for _, seconds in stopwatch.read()]
        return statistics.median(times)


def per_second(amount: float, milliseconds: float) -> float | None:
    """Return a rate, or None if the measured time is 0."""
    return 1000 * amount / milliseconds if milliseconds > 0 else None


def pair_lengths(
    tokens: int = STEP_TOKENS, mean_length: int = MEAN_LENGTH
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return source and target lengths, with end symbols, of pairs with at most `tokens` a side."""
    draws = np.random.default_rng(1)
    most = 2 * tokens // mean_length + 2
    longest = min(LONGEST * mean_length // MEAN_LENGTH, tokens // 3)
    source = np.clip(draws.gamma(2.5, mean_length / 2.5, most).astype(np.int64), 2, longest)  # spread like sentences
    target = np.clip(source + draws.integers(-3, 4, most), 2, longest)
    count = int((np.maximum(source.cumsum(), target.cumsum()) <= tokens).sum())
    return source[:count], target[:count]


def training_steps(
    lengths: tuple[NDArray[np.int64], NDArray[np.int64]], pieces: int, micro_batches: int = 1
) -> list[RankBatch]:
    """Return steps of random pairs of these lengths in other orders."""
    tokens, longest = max(int(side.sum()) for side in lengths), max(int(side.max()) for side in lengths)
    shape = row_shape(
        (lengths[0].mean(), lengths[1].mean()),
        longest,
        batch_tokens=tokens,
        # A row has 5 % more than an even share, and the next multiple of 128.
        max_tokens_per_device=None if micro_batches == 1 else max(int(1.1 * tokens / micro_batches), longest) + 160,
        world_size=1,
    )
    steps = []
    for draws in map(np.random.default_rng, range(NUM_STEPS)):
        order = draws.permutation(len(lengths[0]))
        source, target = (side[order] for side in lengths)
        stores: list[Any] = [_store(side, pieces, draws) for side in (source, target)]
        corpus = ParallelCorpus(*stores, identity="", longest=0)
        rows = rank_rows(source, target, shape, world_size=1, rank=0)
        step = collate(corpus, rows, SPECIAL, shape, num_target_tokens=int(target.sum()))
        steps.append(step.pin_memory() if torch.cuda.is_available() else step)
    return steps


def _store(lengths: NDArray[np.int64], pieces: int, draws: np.random.Generator) -> SimpleNamespace:
    """Return random sentences of these lengths, which include the end symbol, in place of a side of a corpus."""
    tokens = draws.integers(4, pieces, int((lengths - 1).sum()), dtype=np.int32)
    return SimpleNamespace(tokens=tokens, lengths=lengths - 1, offsets=np.cumsum([0, *(lengths - 1)]))
