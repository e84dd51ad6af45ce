"""Where a step's time and memory go, measured alike for every network and without holding it up."""

import time
from collections import defaultdict
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import profile


class Stopwatch:
    """Cuts a timeline into named stretches, each from where it begins to where the next one does.

    On a GPU the timeline is the GPU's own: events, which nobody waits for before `read`. What it waited for
    (data, the host) stands there as long as it stood still, and a host that ran ahead costs nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []  # Any: a time, or an event

    def begin(self, stretch: str) -> None:
        """The last stretch ends, and one of this name begins."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((stretch, event))
        else:
            self._marks.append((stretch, time.perf_counter()))

    def read(self) -> dict[str, float]:
        """Seconds in all stretches of a name; the timeline ends here, and `begin` starts another."""
        self.begin("")
        if self._on_gpu:
            torch.cuda.synchronize()
        marks, self._marks = self._marks, []
        seconds: dict[str, float] = defaultdict(float)
        for (name, start), (_, end) in pairwise(marks):
            seconds[name] += start.elapsed_time(end) / 1000.0 if self._on_gpu else end - start
        return seconds


class PeakMemory:
    """The most bytes that tensors hold at once, beyond those that are there when it is made.

    Not the process's size: several networks share a process, and its allocator keeps what they have freed.
    """

    def __init__(self, device: torch.device) -> None:
        self._profile = None if device.type == "cuda" else profile(profile_memory=True)
        if self._profile is None:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        else:
            self._profile.__enter__()

    def read(self) -> int:
        """Bytes; it ends here."""
        if self._profile is None:
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() - self._before
        self._profile.__exit__(None, None, None)
        results = self._profile.kineto_results
        assert results is not None
        allocations, events = [], list(results.experimental_event_tree())
        while events:
            event = events.pop()
            if hasattr(event.extra_fields, "alloc_size"):
                allocations.append((event.start_time_ns, event.extra_fields.alloc_size))
            events += event.children
        held = peak = 0
        for _, size in sorted(allocations):
            held += size
            peak = max(peak, held)
        return peak


def kept_bytes(network: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of what stays from step to step: weights, buffers and the optimizer's moments."""
    tensors = [*network.parameters(), *network.buffers()]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
