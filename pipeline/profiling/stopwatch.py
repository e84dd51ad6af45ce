"""Time and memory of a training step, measured in the same way for every network and without slowing it."""

import time
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import profile


class Stopwatch:
    """Measures the time of named phases, each of which lasts until the next one begins.

    On a GPU, phases are delimited by events on the GPU's own timeline, and the host does not wait for them before
    `read`. A phase in which the GPU waits for data or for the host includes that wait. Time by which the host runs
    ahead of the GPU does not count.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []  # Any: a time or an event

    def begin(self, phase: str) -> None:
        """End the current phase and begin the next one."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((phase, event))
        else:
            self._marks.append((phase, time.perf_counter()))

    def read(self) -> list[tuple[str, float]]:
        """Return name and seconds of all phases in order, and reset the stopwatch."""
        self.begin("")
        if self._on_gpu:
            torch.cuda.synchronize()
        marks, self._marks = self._marks, []
        return [
            (name, start.elapsed_time(end) / 1000.0 if self._on_gpu else end - start)
            for (name, start), (_, end) in pairwise(marks)
        ]


class PeakMemory:
    """Peak of the memory that tensors hold, relative to the time of construction.

    The size of the process is no measure: several networks share it, and its allocator keeps freed memory.
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
        """Stop measuring and return the peak in bytes."""
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
    """Return the bytes that are kept between steps: weights, buffers and the optimizer's moments."""
    tensors = [*network.parameters(), *network.buffers()]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
