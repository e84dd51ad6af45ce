"""How much memory training takes, tried out before the first step, and how much there is."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from data_module.batching.batch import MicroBatch
from data_module.errors import InputError
from model.translation_module import TranslationModule
from pipeline.runtime.console import say
from pipeline.runtime.memory import (
    _RESIDENT_PEAK_RESET,
    MemoryLimit,
    _reset_resident_peak,
    _resident_peak,
    host_memory_limit,
    keep_freed_memory,
    private_memory,
    release_freed_memory,
)

_PLAIN_ATTENTION_LENGTH = 256
"""Up to here attention on a CPU holds its weights: the longest sentences are not its worst."""
_SLACK = 3.0
"""So many times what the largest micro-batches took is kept between steps, on a CPU: with half of that there were runs
that gave memory back in every step, a seventh of their time."""
_GB = 1e9


class MemoryProbe(Callback):
    """Runs the largest micro-batches forward and backward before the first step, and ends the run if they don't fit.

    Gradients and Adam's moments are there meanwhile. Weights, moments, random numbers, the place in the data and
    whatever is compiled stay as they were. On a CPU the process stays at what was reported from then on.
    """

    def __init__(self, tokens: int, longest: int) -> None:
        """Try micro-batches of `tokens` padded cells a side, of sentences of up to `longest` tokens."""
        self._tokens = max(tokens, longest)
        self._lengths = sorted({min(longest, _PLAIN_ATTENTION_LENGTH), longest})
        self._kept_at_most: float | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raises InputError that says what to change."""
        assert isinstance(pl_module, TranslationModule)
        if pl_module.device.type == "cpu" and not _RESIDENT_PEAK_RESET.exists():
            return  # not Linux: nothing counts what is in memory
        optimizer = trainer.optimizers[0]
        moments = [] if optimizer.state else [torch.ones_like(p) for p in pl_module.parameters() for _ in range(2)]
        devices = [pl_module.device] if pl_module.device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
            peak, room = self._on_gpu(trainer, pl_module) if devices else self._on_cpu(trainer, pl_module)
        del moments
        optimizer.zero_grad()
        if not devices:
            peak = int(min(_SLACK * peak, max(peak, 0.95 * room.size)))
            self._kept_at_most = peak
        say(
            f"memory: at most {peak / _GB:.1f} of {room.size / _GB:.1f} GB with micro-batches of "
            f"{self._tokens:,} tokens a side"
        )

    def on_train_batch_end(self, *_: Any) -> None:
        """Stay within what was reported."""
        self._give_back()

    def on_validation_batch_end(self, *_: Any) -> None:
        """Stay within what was reported."""
        self._give_back()

    def _give_back(self) -> None:
        if self._kept_at_most is None or private_memory() <= self._kept_at_most:
            return
        release_freed_memory()
        # What is still there is in use: to ask again at every step would help nobody.
        self._kept_at_most = max(self._kept_at_most, _SLACK * private_memory())

    def _on_cpu(self, trainer: Trainer, module: TranslationModule) -> tuple[int, MemoryLimit]:
        """Parts of the micro-batch come first, since whoever exceeds the limit is killed without a word."""
        keep_freed_memory()
        room = host_memory_limit(trainer.num_devices)
        smaller = last = fixed = 0
        for part in (16, 8, 4, 2, 1):
            # From one part to the next the memory beyond the fixed one doubles.
            if smaller and 2 * last - fixed > room.size:
                raise self._too_little(room, fixed + 2 * part * (last - fixed), fixed)
            _reset_resident_peak()
            for length in self._lengths:
                _step(trainer, module, max(1, self._tokens // part // length), length)
            smaller, last = last, _resident_peak()
            fixed = 2 * smaller - last
        if last > room.size:
            raise self._too_little(room, last, fixed)
        return last, room

    def _on_gpu(self, trainer: Trainer, module: TranslationModule) -> tuple[int, MemoryLimit]:
        free, total = torch.cuda.mem_get_info(module.device)
        ours = torch.cuda.memory_reserved(module.device)
        room = MemoryLimit(free + ours, f"this GPU (of {total / _GB:.0f} GB)")
        fixed = torch.cuda.memory_allocated(module.device)
        torch.cuda.reset_peak_memory_stats(module.device)
        try:
            for length in self._lengths:
                _step(trainer, module, max(1, self._tokens // length), length)
        except torch.cuda.OutOfMemoryError:
            raise self._too_little(room, 2 * room.size - fixed, fixed) from None
        return torch.cuda.max_memory_allocated(module.device), room

    def _too_little(self, room: MemoryLimit, needed: int, fixed: int) -> InputError:
        """What to change, given bytes needed and those that are needed whatever the size of a micro-batch."""
        fitting = int(0.9 * self._tokens * (room.size - fixed) / max(needed - fixed, 1)) // 100 * 100
        way_out = (
            f"set it to {fitting} or less (the global batch stays as it is)"
            if fitting >= self._lengths[-1]
            else "ask for more memory, or train a smaller network"
        )
        return InputError(
            f"batches.max_tokens_per_device: micro-batches of {self._tokens} tokens a side need about "
            f"{needed / _GB:.1f} GB, and {room.owner} has {room.size / _GB:.1f}; {way_out}"
        )


def _step(trainer: Trainer, module: TranslationModule, pairs: int, length: int) -> None:
    """Forward and backward over that many pairs, of which no rank hears."""
    ids = torch.full((pairs, length), module.special.eos, dtype=torch.int32, device=module.device)
    batch = MicroBatch(
        source=ids, source_mask=ids != module.special.pad, target_input=ids, target_output=ids, pairs=ids[:, 0]
    )
    with trainer.precision_plugin.train_step_context():
        module.losses(batch).smoothed.backward()
