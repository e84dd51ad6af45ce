"""Runs the largest micro-batches before the first step: to compile for a GPU, and to find out whether they fit."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from data_module.batch import MIN_PADDING_TOKENS, RankBatch, RowShape, collate
from data_module.corpus.store import ParallelCorpus
from data_module.errors import InputError
from data_module.translation_data_module import TranslationDataModule
from model.training_module import TranslationModule
from pipeline.checkpointing.checkpoint_io import checkpoint_io
from pipeline.runtime.console import lacking_memory, say
from pipeline.runtime.lightning_private import call_as_step
from pipeline.runtime.memory import (
    MemoryLimit,
    can_measure_peak,
    host_memory_limit,
    keep_freed_memory,
    peak_during,
    private_memory,
    release_freed_memory,
)

_SLACK = 3.0
"""On a CPU, the process keeps up to this many times the memory of the largest micro-batches between steps.

With half of that, some runs returned memory to the system in every step, which cost a seventh of their time.
"""
_GB = 1e9


class MemoryProbe(Callback):
    """Run the largest micro-batches forward and backward before the first step; end the run if they do not fit.

    Gradients and Adam's moments are allocated during the probe; the memory to copy checkpoints to, which is allocated
    later, is counted. On a CPU there is no such copy if the micro-batches do not fit beside it. Weights, moments,
    random states and the position in the data are unchanged afterwards. On a CPU the process then keeps to the reported
    amount of memory.

    If the network is compiled, all micro-batches have the shape of the probe's. The probe runs the compiled code, so
    that all ranks compile at the same time, and nothing is compiled in a training step.
    """

    def __init__(self, data: TranslationDataModule) -> None:
        """Try micro-batches of `data`."""
        self._data = data
        self._kept_at_most: float | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure and report; if memory is too small, raise InputError that says what to change."""
        assert isinstance(pl_module, TranslationModule)
        self._shape = self._data.row_shape(trainer.world_size)
        self._tokens = max(self._shape.source_tokens, self._shape.target_tokens)
        on_gpu = pl_module.device.type == "cuda"
        if not on_gpu and not can_measure_peak():
            return
        # The optimizer creates its moments in the first step; until then these tensors stand in for them.
        optimizer = trainer.optimizers[0]
        moments = [] if optimizer.state else [torch.ones_like(p) for p in pl_module.parameters() for _ in range(2)]
        devices = [pl_module.device] if on_gpu else []
        with torch.random.fork_rng(devices):
            peak, limit = (self._on_gpu if on_gpu else self._on_cpu)(trainer, pl_module)
        del moments
        pl_module.zero_grad()
        if not on_gpu:
            copy = checkpoint_io(trainer).copy.size
            peak = copy + int(min(_SLACK * peak, max(peak, 0.95 * limit.size - copy)))
            self._kept_at_most = peak
        say(
            f"memory: at most {peak / _GB:.1f} of {limit.size / _GB:.1f} GB with micro-batches of "
            f"{self._tokens:,} tokens a side"
        )

    def on_train_batch_end(self, *_: object) -> None:
        """Return freed memory to the system if the process exceeds the reported amount."""
        if self._kept_at_most is None or private_memory() <= self._kept_at_most:
            return
        release_freed_memory()
        # The remaining memory is in use; releasing in every step would free nothing.
        self._kept_at_most = max(self._kept_at_most, _SLACK * private_memory())

    def on_validation_batch_end(self, *_: object) -> None:
        """Return freed memory to the system if the process exceeds the reported amount."""
        self.on_train_batch_end()

    def _on_cpu(self, trainer: Trainer, module: TranslationModule) -> tuple[int, MemoryLimit]:
        """Try an eighth of the micro-batch, a quarter, and the whole, if it fits: beyond its limit a process is killed.

        No copy of checkpoints is made if it and the micro-batch do not fit together.

        Returns the peak without the copy, in bytes, and its limit.
        """
        keep_freed_memory()
        limit = host_memory_limit(trainer.num_devices)
        writer = checkpoint_io(trainer)
        for parameter in module.parameters():  # The later parts have the gradients of the first one.
            parameter.grad = torch.zeros_like(parameter)
        smaller = peak = 0
        for part in (1, 2, 8):  # eighths of the micro-batch
            smaller_peak = peak
            try:
                peak = peak_during(partial(self._steps, trainer, module, 8 // part))
            except (RuntimeError, MemoryError) as error:
                if (lacking := lacking_memory(error)) is None:
                    raise
                fitting = self._tokens * smaller // 8 or self._tokens // 16
                raise self._does_not_fit(f"do not fit ({lacking})", fitting) from None
            if smaller:  # The line through an eighth and a quarter predicts the whole within some percent.
                growth = (peak - smaller_peak) / (part - smaller)
                whole = peak + (8 - part) * growth
                if whole + writer.copy.size > limit.size:
                    writer.release()
                if whole > limit.size:
                    raise self._needs_more(limit, whole, whole - 8 * growth)
            smaller = part
        return peak, limit

    def _on_gpu(self, trainer: Trainer, module: TranslationModule) -> tuple[int, MemoryLimit]:
        free, total = torch.cuda.mem_get_info(module.device)
        ours = torch.cuda.memory_reserved(module.device)
        limit = MemoryLimit(free + ours, f"this GPU (of {total / _GB:.0f} GB)")
        fixed = torch.cuda.memory_allocated(module.device)
        try:
            if module.compiled_forward is not None:
                say("compiling the network; this takes a few minutes, and less if it has been compiled before")
                self._steps(trainer, module)
            # The compiler's measurements of kernels take memory that training does not need.
            torch.cuda.reset_peak_memory_stats(module.device)
            self._steps(trainer, module)
        except RuntimeError as error:  # The compiler raises errors of its own in place of those that it meets.
            if lacking_memory(error) is None:
                raise
            raise self._needs_more(limit, 2 * limit.size - fixed, fixed) from None
        return torch.cuda.max_memory_allocated(module.device), limit

    def _needs_more(self, limit: MemoryLimit, needed: float, fixed: float) -> InputError:
        """Return the error; `fixed` of the bytes `needed` do not depend on the size of a micro-batch."""
        problem = f"need about {needed / _GB:.1f} GB, and {limit.owner} has {limit.size / _GB:.1f}"
        return self._does_not_fit(problem, int(0.9 * self._tokens * (limit.size - fixed) / max(needed - fixed, 1)))

    def _does_not_fit(self, problem: str, fitting: int) -> InputError:
        """Return the error; `fitting` is a number of tokens that fits."""
        fitting = fitting // 100 * 100
        way_out = (
            f"set it to {fitting} or less (the global batch stays the same)"
            if fitting >= self._data.longest
            else "ask for more memory, or train a smaller network"
        )
        return InputError(
            f"batches.max_tokens_per_device: micro-batches of {self._tokens} tokens a side {problem}; {way_out}"
        )

    def _steps(self, trainer: Trainer, module: TranslationModule, divisor: int = 1) -> None:
        """Run forward and backward passes, without gradient synchronization, of the largest micro-batch or a part."""
        batch = _longest_sentences(self._data, self._shape, divisor).to(module.device)
        call_as_step(trainer, "warm_up", batch)


def _longest_sentences(data: TranslationDataModule, shape: RowShape, divisor: int) -> RankBatch:
    """Return a micro-batch of the longest sentences, of the largest size divided by `divisor`.

    With a kernel of attention, all micro-batches take the same memory. Plain attention takes the most memory for the
    longest sentences: as many as the longer row holds, and on the other side as long as its row allows.
    """
    length = data.longest
    smallest = length + MIN_PADDING_TOKENS
    source_tokens, target_tokens = (
        max(smallest, tokens // divisor) for tokens in (shape.source_tokens, shape.target_tokens)
    )
    shape = shape._replace(source_tokens=source_tokens, target_tokens=target_tokens, constant=True)
    rows = [tokens - MIN_PADDING_TOKENS for tokens in (source_tokens, target_tokens)]
    count = min(max(rows) // length, min(rows), shape.max_pairs)
    ids = np.full(length, data.special.eos)
    sides: list[Any] = [
        SimpleNamespace(lengths=np.full(count, min(length, row // count) - 1), offsets=np.zeros(count), tokens=ids)
        for row in rows
    ]
    corpus = ParallelCorpus(sides[0], sides[1], longest=length - 1)
    return collate(corpus, [np.arange(count)], data.special, shape, num_target_tokens=count * length)
