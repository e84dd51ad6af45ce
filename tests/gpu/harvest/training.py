"""Stages `base` and `big`: the training step of `fit`, eager and compiled, timed and profiled."""

import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from itertools import cycle
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from model.packed_attention import PLAIN_ATTENTION
from model.settings import DecodingSettings, NetworkSettings, TrainingSettings
from model.training_module import TranslationModule
from pipeline.monitoring.performance import training_flops
from pipeline.runtime.console import quiet_lightning
from pipeline.runtime.step_clock import Stopwatch
from tests.compilations import Compilations
from tests.conftest import ALONE
from tests.gpu.backends import make_backend
from tests.gpu.harvest.job import PIECES, SPECIAL, STEP_TOKENS, Job, pair_lengths, per_second, training_steps

QUIET_STEPS, TIMED_STEPS, HOST_STEPS, PROFILED_STEPS = 8, 20, 5, 3
"""Numbers of steps: without a compilation before timing starts; timed; with host time measured; profiled."""
TOP_KERNELS = 30


class Case(NamedTuple):
    kernels: str = "triton"
    compiled: bool = False
    micro_batches: int = 1
    attention: str | None = None
    """"plain"; None for that of the kernels."""


CASES = [Case(), Case("pytorch"), Case(compiled=True)]
"""Eager mode comes first, since compiling takes minutes and may exceed the time limit."""
MORE_CASES = [Case(micro_batches=8), Case("pytorch", attention="plain")]


def run_base(job: Job) -> None:
    _run(job, NetworkSettings(), [*CASES[:2], *MORE_CASES, CASES[2], Case("pytorch", compiled=True)])


def run_big(job: Job) -> None:
    _run(job, NetworkSettings(d_model=1024, d_ff=4096, num_heads=16, dropout=0.3), CASES)


def _run(job: Job, network: NetworkSettings, cases: list[Case]) -> None:
    quiet_lightning()
    pieces, tokens = PIECES, STEP_TOKENS
    if job.tiny:
        network, pieces, tokens = NetworkSettings(num_layers=1, d_model=16, d_ff=32, num_heads=2), 100, 60
    size = 64 if job.tiny else 8192
    square = torch.randn(size, size, device=job.device, dtype=torch.bfloat16)
    best = 2000.0 * size**3 / job.milliseconds(lambda: square @ square, head_start=1.0)
    job.record("network", **asdict(network), pieces=pieces, product_flops_per_second=best)
    for case in cases:
        torch.manual_seed(1)
        backend = make_backend(job.device.type, case.kernels, case.compiled)
        if case.attention == "plain":
            backend = replace(backend, attention=PLAIN_ATTENTION)
        module = TranslationModule(pieces, SPECIAL, network, TrainingSettings(), DecodingSettings(), 1, backend)
        job.attempt("step", lambda m=module, c=case: _train(job, m, c, tokens, best), **case._asdict())


def _train(job: Job, module: TranslationModule, case: Case, tokens: int, best: float) -> dict[str, Any]:
    lengths, pieces = pair_lengths(tokens), module.network.vocabulary_size
    steps = training_steps(lengths, pieces, case.micro_batches)
    with Compilations() as compilations:
        measurement = Measurement(job, compilations, case)
        trainer = Trainer(
            accelerator="gpu" if job.device.type == "cuda" else "cpu",
            devices=1,
            precision="bf16-mixed",
            max_steps=-1,
            max_epochs=-1,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            callbacks=[measurement],
            **ALONE,
        )
        trainer.fit(module, train_dataloaders=cycle(steps))
    milliseconds = measurement.figures["step_milliseconds"]
    flops = training_flops(module.network_settings, pieces, *lengths)
    return {
        **measurement.figures,
        "real_tokens": steps[0].num_tokens,
        "row_tokens": steps[0].num_row_tokens,
        "target_tokens_per_second": per_second(float(lengths[1].sum()), milliseconds),
        "flops_per_step": flops,
        "flops_per_second": per_second(flops, milliseconds),
        "mfu": 1000 * flops / milliseconds / best,
    }


class Measurement(Callback):
    """Waits until no step compiles any more, measures some steps, and stops training."""

    def __init__(self, job: Job, compilations: Compilations, case: Case) -> None:
        self.figures: dict[str, Any] = {}
        self._job, self._compilations, self._case = job, compilations, case
        self._began = time.perf_counter()
        self._steps = self._compiled = 0
        self._waits = False
        self._phases = self._measure()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Start the host's clock, after waiting for the GPU if host time is measured."""
        if self._waits:
            self._wait()
        self._started = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Go on measuring. A step that compiled something starts the measurement anew."""
        self._steps += 1
        if self._compilations.count != self._compiled:
            self._compiled = self._compilations.count
            self._phases = self._measure()
        trainer.should_stop = next(self._phases, "done") == "done"

    def _measure(self) -> Iterator[None]:
        """Yield in the callback at the end of each step until all is measured."""
        tiny, on_gpu = self._job.tiny, self._job.device.type == "cuda"
        self._waits = False
        yield from [None] * (1 if tiny else QUIET_STEPS)
        self._wait()
        self.figures = {
            "compiled_graphs": self._compilations.num_graphs,
            "warm_up_steps": self._steps,
            "warm_up_seconds": time.perf_counter() - self._began,
        }
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        stopwatch = Stopwatch(self._job.device)
        for _ in range(2 if tiny else TIMED_STEPS):
            stopwatch.begin("step")
            yield
        steps = [1000 * seconds for _, seconds in stopwatch.read()]
        low, median, high = statistics.quantiles(steps, n=4)
        self.figures |= {"step_milliseconds": median, "step_quartiles": [low, high]}
        if on_gpu:
            self.figures["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
        self._job.record("step times", **self._case._asdict(), **self.figures)
        self._waits, host = True, []
        for _ in range(1 if tiny else HOST_STEPS):
            yield
            # The GPU was idle at the start, so this includes no wait unless the launch queue was full.
            host.append(1000 * (time.perf_counter() - self._started))
        self._waits = False
        self.figures["host_milliseconds"] = statistics.median(host)
        self._wait()
        num_steps = 1 if tiny else PROFILED_STEPS
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
            yield from [None] * num_steps
            self._wait()
        # PyTorch's own table of these events takes many seconds to build.
        self.figures |= kernels_of(profiler.profiler.kineto_results.events(), num_steps)

    def _wait(self) -> None:
        if self._job.device.type == "cuda":
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
        {"kernel": name[:160], "count": counts[name] / steps, "milliseconds": spent, "share": spent / total}
        for name, spent in milliseconds.most_common(TOP_KERNELS)
    ]
    return {"kernel_milliseconds": total, "device_operations": counts.total() / steps, "top_kernels": table}
