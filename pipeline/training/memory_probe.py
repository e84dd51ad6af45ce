"""How much memory training takes, tried out before the first step, and how much there is."""

import ctypes
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only

from data_module.batching.batch import Batch
from data_module.errors import InputError
from model.translation_module import TranslationModule

_PLAIN_ATTENTION_LENGTH = 256
"""Up to here attention on a CPU holds its weights: the longest sentences are not its worst."""
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_RESIDENT_PEAK_RESET = Path("/proc/self/clear_refs")
_SLACK = 3.0
"""So many times what the largest micro-batches took is kept between steps, on a CPU: with half of that there were runs
that gave memory back in every step, a seventh of their time."""
_GB = 1e9


def keep_freed_memory() -> None:
    """Let this process keep what it frees, for the next step.

    By default glibc hands large blocks back at once, and the system fills each anew with zeros, page by page: up to
    a fifth of a step on a CPU. Does nothing with another allocator.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_MMAP_MAX, 0)


def give_back_freed_memory() -> None:
    """Undo what `keep_freed_memory` has led to so far: blocks of ever other sizes leave more and more gaps."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


class Room(NamedTuple):
    """Memory that a process may use, in bytes, and whose it is."""

    size: int
    owner: str


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
        _say(
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
        if self._kept_at_most is None or own_memory() <= self._kept_at_most:
            return
        give_back_freed_memory()
        # What is still there is in use: to ask again at every step would help nobody.
        self._kept_at_most = max(self._kept_at_most, _SLACK * own_memory())

    def _on_cpu(self, trainer: Trainer, module: TranslationModule) -> tuple[int, Room]:
        """Parts of the micro-batch come first, since whoever exceeds the limit is killed without a word."""
        keep_freed_memory()
        room = cpu_room(trainer.num_devices)
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

    def _on_gpu(self, trainer: Trainer, module: TranslationModule) -> tuple[int, Room]:
        free, total = torch.cuda.mem_get_info(module.device)
        ours = torch.cuda.memory_reserved(module.device)
        room = Room(free + ours, f"this GPU (of {total / _GB:.0f} GB)")
        fixed = torch.cuda.memory_allocated(module.device)
        torch.cuda.reset_peak_memory_stats(module.device)
        try:
            for length in self._lengths:
                _step(trainer, module, max(1, self._tokens // length), length)
        except torch.cuda.OutOfMemoryError:
            raise self._too_little(room, 2 * room.size - fixed, fixed) from None
        return torch.cuda.max_memory_allocated(module.device), room

    def _too_little(self, room: Room, needed: int, fixed: int) -> InputError:
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
    batch = Batch(
        source=ids, source_mask=ids != module.special.pad, target_input=ids, target_output=ids, pairs=ids[:, 0]
    )
    with trainer.precision_plugin.train_step_context():
        module.losses(batch).smoothed.backward()


def cpu_room(processes: int) -> Room:
    """What each of a node's processes may use: its share of the job's limit, or of the machine.

    Limits are SLURM's and the control groups' (both versions), the lowest counts.
    """
    rooms = [Room(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine")]
    if "SLURM_MEM_PER_NODE" in os.environ:
        rooms.append(Room(int(os.environ["SLURM_MEM_PER_NODE"]) << 20, "this job"))
    elif "SLURM_MEM_PER_CPU" in os.environ:
        cpus = int(os.environ.get("SLURM_CPUS_ON_NODE", "1"))
        rooms.append(Room(cpus * int(os.environ["SLURM_MEM_PER_CPU"]) << 20, "this job"))
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            mount = Path("/sys/fs/cgroup") / controllers
            group = mount / path.lstrip("/")
            # A group's limit holds for all below it. In a container the path may be the host's, and only the top there.
            for folder in (group, *(parent for parent in group.parents if parent.is_relative_to(mount))):
                for limit in (folder / "memory.max", folder / "memory.limit_in_bytes"):
                    if limit.exists() and (size := limit.read_text().strip()).isdigit():
                        rooms.append(Room(int(size), "this process's control group"))
    room = min(room for room in rooms if room.size > 0)
    if processes == 1:
        return room
    return Room(room.size // processes, f"each of the {processes} processes on {room.owner}")


def own_memory() -> int:
    """Bytes in memory that are this process's own, and no file's."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def _reset_resident_peak() -> None:
    """The kernel counts from now on."""
    _RESIDENT_PEAK_RESET.write_text("5")


def _resident_peak() -> int:
    """Bytes that were in memory at once since `_reset_resident_peak`."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


@rank_zero_only
def _say(message: str) -> None:
    print(message, file=sys.stderr)
