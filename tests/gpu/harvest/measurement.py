"""Measurements of training: step time on the GPU's clock, host time, kernels, memory and compilations."""

import statistics
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from pipeline.profiling.compilations import Compilations
from tests.gpu.harvest.job import Job

QUIET_STEPS, TIMED_STEPS, HOST_STEPS, PROFILED_STEPS = 8, 20, 5, 3
"""Numbers of steps: without a compilation before timing starts; timed; with host time measured; profiled."""
TOP_KERNELS = 30


class Measurement(Callback):
    """Waits until no step compiles any more, measures some steps, and stops training."""

    def __init__(self, job: Job, compilations: Compilations, about: dict[str, Any]) -> None:
        self.figures: dict[str, Any] = {}
        self.step_milliseconds = 0.0
        self._job, self._compilations, self._about = job, compilations, about
        self._on_gpu = job.device.type == "cuda"
        self._began = time.perf_counter()
        self._phase = self._warm_up
        self._steps = self._last_compiled = self._compiled_before = 0
        self._marks: list[Any] = []
        self._started = 0.0
        self._host: list[float] = []
        self._profiler: Any = None
        self._profiled = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Start the host's clock, after waiting for the GPU if host time is measured."""
        if self._phase == self._time_host:
            self._wait()
        self._started = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Call the current phase. A step that compiled something restarts the warm-up."""
        self._steps += 1
        if self._compilations.count != self._compiled_before:
            self._compiled_before, self._last_compiled = self._compilations.count, self._steps
            self._marks, self._host = [], []
            self._phase = self._warm_up
        self._phase(trainer)

    def _warm_up(self, _: Trainer) -> None:
        if self._steps - self._last_compiled < (1 if self._job.tiny else QUIET_STEPS):
            return
        self._wait()
        self.figures |= {
            "compiled_graphs": self._compilations.num_graphs,
            "warm_up_steps": self._steps,
            "warm_up_seconds": time.perf_counter() - self._began,
        }
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
        self._mark()
        self._phase = self._time_steps

    def _time_steps(self, _: Trainer) -> None:
        self._mark()
        if len(self._marks) <= (2 if self._job.tiny else TIMED_STEPS):
            return
        self._wait()
        if self._on_gpu:
            steps = [a.elapsed_time(b) for a, b in zip(self._marks, self._marks[1:], strict=False)]
            self.figures["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
        else:
            steps = [1000 * (b - a) for a, b in zip(self._marks, self._marks[1:], strict=False)]
        self.step_milliseconds = statistics.median(steps)
        low, _, high = statistics.quantiles(steps, n=4) if len(steps) > 1 else [steps[0]] * 3
        self.figures |= {"step_milliseconds": self.step_milliseconds, "step_quartiles": [low, high]}
        self._job.record("step times", **self._about, **self.figures)
        self._phase = self._time_host

    def _time_host(self, _: Trainer) -> None:
        self._host.append(1000 * (time.perf_counter() - self._started))
        if len(self._host) < (1 if self._job.tiny else HOST_STEPS):
            return
        # The GPU was idle at the start, so this includes no wait unless the launch queue was full.
        self.figures["host_milliseconds"] = statistics.median(self._host)
        self._wait()
        self._profiler = profile(activities=[ProfilerActivity.CUDA if self._on_gpu else ProfilerActivity.CPU])
        self._profiler.start()
        self._phase = self._profile

    def _profile(self, trainer: Trainer) -> None:
        self._profiled += 1
        if self._profiled < (1 if self._job.tiny else PROFILED_STEPS):
            return
        self._wait()
        self._profiler.stop()
        # PyTorch's own table of these events takes many seconds to build.
        self.figures |= kernels_of(self._profiler.profiler.kineto_results.events(), self._profiled)
        trainer.should_stop = True

    def _mark(self) -> None:
        if not self._on_gpu:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()


def kernels_of(events: Iterable[Any], steps: int) -> dict[str, Any]:
    """Return the kernels' total time and number in a step, and the kernels that took the most time."""
    milliseconds, counts = Counter[str](), Counter[str]()
    for event in events:
        if event.device_type() == DeviceType.CUDA:
            milliseconds[event.name()] += event.duration_ns() / 1e6 / steps
            counts[event.name()] += 1
    total = milliseconds.total()
    table = [
        {
            "kernel": name[:160],
            "count": counts[name] / steps,
            "milliseconds": spent,
            "share": spent / total if total else None,
        }
        for name, spent in milliseconds.most_common(TOP_KERNELS)
    ]
    return {"kernel_milliseconds": total, "device_operations": counts.total() / steps, "top_kernels": table}
