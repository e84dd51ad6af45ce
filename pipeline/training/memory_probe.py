"""Runs the largest micro-batches before the first step, to find out whether they fit into memory."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from data_module.batching.batch import MicroBatch
from data_module.errors import InputError
from model.translation_module import TranslationModule
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

_PLAIN_ATTENTION_LENGTH = 256
"""Up to this length attention on a CPU stores its weights: the longest sentences may not need the most memory."""
_SLACK = 3.0
"""On a CPU, this many times the memory of the largest micro-batches is kept between steps.

With half of that, some runs returned memory to the system in every step, which took a seventh of their time.
"""
_GB = 1e9


class MemoryProbe(Callback):
    """Run the largest micro-batches forward and backward before the first step; end the run if they do not fit.

    Gradients and Adam's moments are allocated during the probe. Weights, moments, random states, the position in the
    data and compiled graphs are unchanged afterwards. On a CPU the process keeps to the reported amount from then on.
    """

    def __init__(self, tokens: int, longest: int) -> None:
        """Try micro-batches of `tokens` padded tokens a side, of sentences of up to `longest` tokens."""
        self._tokens = max(tokens, longest)
        self._lengths = sorted({min(longest, _PLAIN_ATTENTION_LENGTH), longest})
        self._kept_at_most: float | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure and report; raise InputError that says what to change where memory is too small."""
        assert isinstance(pl_module, TranslationModule)
        if pl_module.device.type == "cpu" and not can_measure_peak():
            return
        optimizer = trainer.optimizers[0]
        moments = [] if optimizer.state else [torch.ones_like(p) for p in pl_module.parameters() for _ in range(2)]
        devices = [pl_module.device] if pl_module.device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
            peak, limit = self._on_gpu(trainer, pl_module) if devices else self._on_cpu(trainer, pl_module)
        del moments
        optimizer.zero_grad()
        if not devices:
            peak = int(min(_SLACK * peak, max(peak, 0.95 * limit.size)))
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

    def _release(self) -> None:
        if self._kept_at_most is None or private_memory() <= self._kept_at_most:
            return
        release_freed_memory()
        # What remains is in use; trying again in every step would free nothing.
        self._kept_at_most = max(self._kept_at_most, _SLACK * private_memory())

    def _on_cpu(self, trainer: Trainer, module: TranslationModule) -> tuple[int, MemoryLimit]:
        """Try growing parts of the micro-batch: a process that exceeds its limit is killed without an error."""
        keep_freed_memory()
        limit = host_memory_limit(trainer.num_devices)
        smaller = last = fixed = 0
        for part in (16, 8, 4, 2, 1):
            # Each part doubles the memory that depends on its size.
            if smaller and 2 * last - fixed > limit.size:
                raise self._does_not_fit(limit, fixed + 2 * part * (last - fixed), fixed)
            reset_resident_peak()
            for length in self._lengths:
                _step(trainer, module, max(1, self._tokens // part // length), length)
            smaller, last = last, resident_peak()
            fixed = 2 * smaller - last
        if last > limit.size:
            raise self._does_not_fit(limit, last, fixed)
        return last, limit

    def _on_gpu(self, trainer: Trainer, module: TranslationModule) -> tuple[int, MemoryLimit]:
        free, total = torch.cuda.mem_get_info(module.device)
        ours = torch.cuda.memory_reserved(module.device)
        limit = MemoryLimit(free + ours, f"this GPU (of {total / _GB:.0f} GB)")
        fixed = torch.cuda.memory_allocated(module.device)
        torch.cuda.reset_peak_memory_stats(module.device)
        try:
            for length in self._lengths:
                _step(trainer, module, max(1, self._tokens // length), length)
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


def _step(trainer: Trainer, module: TranslationModule, pairs: int, length: int) -> None:
    """Run one forward and backward pass without gradient synchronization."""
    ids = torch.full((pairs, length), module.special.eos, dtype=torch.int32, device=module.device)
    batch = MicroBatch(
        source=ids, source_mask=ids != module.special.pad, target_input=ids, target_output=ids, pairs=ids[:, 0]
    )
    with trainer.precision_plugin.train_step_context():
        module.losses(batch).smoothed.backward()
