"""Runs the largest micro-batches before the first step: to compile for a GPU, and to find out whether they fit."""

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from data_module.batching.batch import RankBatch, collate
from data_module.batching.blocks import NARROWEST
from data_module.batching.rank_rows import MIN_PADDING_TOKENS, RowShape
from data_module.errors import InputError
from data_module.translation_data_module import TranslationDataModule
from model.packed_attention import KEPT_WIDTH
from model.training_module import TranslationModule
from pipeline.checkpointing.checkpoint_io import AtomicCheckpointIO
from pipeline.compat.lightning import call_as_step
from pipeline.runtime.console import say
from pipeline.runtime.memory import (
    MemoryLimit,
    can_measure_peak,
    host_memory_limit,
    keep_freed_memory,
    private_memory,
    release_freed_memory,
    reset_resident_peak,
    resident_peak,
)

_SLACK = 3.0
"""On a CPU, this many times the memory of the largest micro-batches is kept between steps.

With half of that, some runs returned memory to the system in every step, which took a seventh of their time.
"""
_GB = 1e9


class MemoryProbe(Callback):
    """Run the largest micro-batches forward and backward before the first step; end the run if they do not fit.

    Gradients and Adam's moments are allocated during the probe, and the copy that checkpoints are written from is in
    memory before it. On a CPU the copy is given up if the micro-batches do not fit beside it. Weights, moments, random
    states and the position in the data are unchanged afterwards. On a CPU the process keeps to the reported amount from
    then on.

    Where sentences lie end to end, all micro-batches have the shape of the probe's. There the probe runs compiled code,
    so that all ranks compile at the same time, and nothing is compiled in a training step. Blocks differ between
    micro-batches, so their probe compiles nothing.
    """

    def __init__(self, data: TranslationDataModule) -> None:
        """Try micro-batches of `data`."""
        self._data = data
        longest = data.longest
        # In blocks, attention keeps the weights of blocks up to a width, so the longest sentences may not need the most
        # memory; and a sentence that is a little longer than a block takes a block of twice the width for itself.
        self._lengths = [longest]
        if data.in_blocks:
            widest = NARROWEST << max(0, (longest - 1).bit_length() - NARROWEST.bit_length() + 1)
            lengths = (longest, min(longest, KEPT_WIDTH), widest // 2 + 1)
            self._lengths = sorted({length for length in lengths if 0 < length <= longest})
        self._kept_at_most: float | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure and report; raise InputError that says what to change where memory is too small."""
        assert isinstance(pl_module, TranslationModule)
        self._shape = self._data.row_shape(trainer.world_size)
        self._tokens = max(self._shape.source_tokens, self._shape.target_tokens)
        if pl_module.device.type == "cpu" and not can_measure_peak():
            return
        optimizer = trainer.optimizers[0]
        moments = [] if optimizer.state else [torch.ones_like(p) for p in pl_module.parameters() for _ in range(2)]
        devices = [pl_module.device] if pl_module.device.type == "cuda" else []
        with torch.random.fork_rng(devices), self._eager():
            if devices:
                peak, limit = self._on_gpu(trainer, pl_module)
            else:
                peak, limit, copy = self._on_cpu(trainer, pl_module)
        del moments
        pl_module.zero_grad()
        if not devices:
            peak = copy + int(min(_SLACK * (peak - copy), max(peak, 0.95 * limit.size) - copy))
            self._kept_at_most = peak
        say(
            f"memory: at most {peak / _GB:.1f} of {limit.size / _GB:.1f} GB with micro-batches of "
            f"{self._tokens:,} tokens a side"
        )

    def on_train_batch_end(self, *_: Any) -> None:
        """Keep to the reported amount."""
        self._release()

    def on_validation_batch_end(self, *_: Any) -> None:
        """Keep to the reported amount."""
        self._release()

    def _eager(self) -> AbstractContextManager[Any]:
        """Return a context without compilation, unless what it compiles is what training steps run."""
        return torch.compiler.set_stance("force_eager") if self._data.in_blocks else nullcontext()

    def _release(self) -> None:
        if self._kept_at_most is None or private_memory() <= self._kept_at_most:
            return
        release_freed_memory()
        # What remains is in use; trying again in every step would free nothing.
        self._kept_at_most = max(self._kept_at_most, _SLACK * private_memory())

    def _on_cpu(self, trainer: Trainer, module: TranslationModule) -> tuple[int, MemoryLimit, int]:
        """Try growing parts of the micro-batch: a process that exceeds its limit is killed without an error.

        The copy that checkpoints are written from is given up where it and the micro-batch do not fit together.

        Returns the peak, its limit, and the bytes of the copy, which are part of the peak.
        """
        keep_freed_memory()
        limit = host_memory_limit(trainer.num_devices)
        writer = trainer.strategy.checkpoint_io
        writer = writer if isinstance(writer, AtomicCheckpointIO) else AtomicCheckpointIO()
        copy = writer.copy_bytes
        smaller = last = fixed = 0
        for part in (16, 8, 4, 2, 1, 0):
            # Each part doubles the memory that depends on its size.
            needed = 2 * last - fixed if part else last
            if copy and smaller and needed > limit.size:
                writer.release()
                smaller, last, fixed, needed, copy = smaller - copy, last - copy, fixed - copy, needed - copy, 0
            if smaller and needed > limit.size:
                raise self._does_not_fit(limit, fixed + max(1, 2 * part) * (last - fixed), fixed)
            if not part:
                break
            reset_resident_peak()
            for length in self._lengths:
                self._step(trainer, module, length, part)
            smaller, last = last, resident_peak()
            fixed = 2 * smaller - last
        return last, limit, copy

    def _on_gpu(self, trainer: Trainer, module: TranslationModule) -> tuple[int, MemoryLimit]:
        free, total = torch.cuda.mem_get_info(module.device)
        ours = torch.cuda.memory_reserved(module.device)
        limit = MemoryLimit(free + ours, f"this GPU (of {total / _GB:.0f} GB)")
        fixed = torch.cuda.memory_allocated(module.device)
        try:
            if module.compiled_forward is not None and not self._data.in_blocks:
                say("compiling the network; this takes a few minutes, and less if it has been compiled before")
                self._step(trainer, module, self._lengths[-1], 1)
            # The compiler's measurements of kernels take memory that training does not need.
            torch.cuda.reset_peak_memory_stats(module.device)
            for length in self._lengths:
                self._step(trainer, module, length, 1)
        except torch.cuda.OutOfMemoryError:
            raise self._does_not_fit(limit, 2 * limit.size - fixed, fixed) from None
        return torch.cuda.max_memory_allocated(module.device), limit

    def _does_not_fit(self, limit: MemoryLimit, needed: int, fixed: int) -> InputError:
        """Return the error; of the bytes `needed`, `fixed` do not depend on the size of a micro-batch."""
        fitting = int(0.9 * self._tokens * (limit.size - fixed) / max(needed - fixed, 1)) // 100 * 100
        way_out = (
            f"set it to {fitting} or less (the global batch stays the same)"
            if fitting >= self._lengths[-1]
            else "ask for more memory, or train a smaller network"
        )
        return InputError(
            f"batches.max_tokens_per_device: micro-batches of {self._tokens} tokens a side need about "
            f"{needed / _GB:.1f} GB, and {limit.owner} has {limit.size / _GB:.1f}; {way_out}"
        )

    def _step(self, trainer: Trainer, module: TranslationModule, length: int, part: int) -> None:
        """Run one forward and backward pass without gradient synchronization.

        The micro-batch is a part of the largest one, of sentences of one length.
        """
        batch = _same_sentences(self._data, self._shape, length, part).to(module.device)
        call_as_step(trainer, "warm_up", batch)


def _same_sentences(data: TranslationDataModule, shape: RowShape, length: int, part: int) -> RankBatch:
    """Return a micro-batch of a part of the largest size, of sentences of `length` tokens a side."""
    smallest = length + MIN_PADDING_TOKENS
    source_tokens, target_tokens = (
        max(smallest, tokens // part) for tokens in (shape.source_tokens, shape.target_tokens)
    )
    shape = shape._replace(source_tokens=source_tokens, target_tokens=target_tokens)
    count = min((min(source_tokens, target_tokens) - MIN_PADDING_TOKENS) // length, shape.max_sentences)
    sentence = SimpleNamespace(
        lengths=np.full(count, length - 1), offsets=np.zeros(count), tokens=np.full(length, data.special.eos)
    )
    corpus: Any = SimpleNamespace(source=sentence, target=sentence)
    return collate(corpus, [np.arange(count)], data.special, shape, num_target_tokens=count * length)
