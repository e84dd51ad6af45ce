"""Finds ranks that are slower than the others, which wait for them in every step."""

import statistics

import torch.distributed as dist

from pipeline.runtime.launch import node_name

SLOW = 1.2
"""A rank is slow if its own part of a step takes this many times as long as that of the median rank."""
WINDOW_STEPS = 50
"""A slow rank is reported after two consecutive windows of at least this many steps: one may contain a single stall,
such as the start of the run or a shared disk that does not respond."""


class Stragglers:
    """Compares the ranks' own step times, and reports each slow rank once.

    A rank's own time does not include waiting for other ranks: with it, all ranks would take equally long.

    Args:
        nodes: the node of each rank.
    """

    def __init__(self, nodes: list[str]) -> None:
        self._nodes = nodes
        self._reported: set[int] = set()
        self._slow_before: set[int] = set()
        self._steps_before = 0
        self._start_window()

    def _start_window(self) -> None:
        self._steps = 0
        self._seconds = [0.0] * len(self._nodes)

    def add(self, step_seconds: list[float], steps: int) -> list[str]:
        """Add an interval of training; return a line for each rank to report.

        Args:
            step_seconds: each rank's own mean seconds per step.
            steps: number of steps of the interval.
        """
        self._steps += steps
        self._seconds = [total + steps * one for total, one in zip(self._seconds, step_seconds, strict=True)]
        if self._steps < WINDOW_STEPS:
            return []
        median = statistics.median_low(self._seconds)
        slow = {rank for rank, seconds in enumerate(self._seconds) if seconds >= SLOW * median}
        found = sorted((slow & self._slow_before) - self._reported)
        self._reported.update(found)
        steps = self._steps_before + self._steps
        lines = [
            f"rank {rank} on {self._nodes[rank]} has been slow for {steps} steps, and the others wait for it: its own "
            f"part of a step takes {self._seconds[rank] / self._steps:.3g} s, "
            f"{100 * (self._seconds[rank] / median - 1):.0f} % more than the median rank's"
            for rank in found
        ]
        self._slow_before, self._steps_before = slow, self._steps
        self._start_window()
        return lines


def slowest_rank(step_seconds: list[float]) -> tuple[int, float]:
    """Return the rank that takes the longest, and its time over that of the median rank.

    The median of an even number of ranks is the faster one of the two in the middle.
    """
    rank = max(range(len(step_seconds)), key=step_seconds.__getitem__)
    return rank, step_seconds[rank] / statistics.median_low(step_seconds)


def node_of_each_rank() -> list[str]:
    """Return the name of each rank's node; all ranks call it."""
    nodes = [node_name()]
    if dist.is_initialized():
        nodes *= dist.get_world_size()
        dist.all_gather_object(nodes, node_name())
    return nodes
