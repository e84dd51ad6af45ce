"""Host memory: what this process uses, what it may use, and what it returns to the system."""

import ctypes
import os
from pathlib import Path
from typing import NamedTuple

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4

_RESIDENT_PEAK_RESET = Path("/proc/self/clear_refs")


def keep_freed_memory() -> None:
    """Let this process keep what it frees, for the next step.

    By default glibc hands large blocks back at once, and the system fills each anew with zeros, page by page: up to
    a fifth of a step on a CPU. Does nothing with another allocator.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_MMAP_MAX, 0)


def release_freed_memory() -> None:
    """Undo what `keep_freed_memory` has led to so far: blocks of ever other sizes leave more and more gaps."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


class MemoryLimit(NamedTuple):
    """Memory that a process may use, in bytes, and whose it is."""

    size: int
    owner: str


def host_memory_limit(processes: int) -> MemoryLimit:
    """What each of a node's processes may use: its share of the job's limit, or of the machine.

    Limits are SLURM's and the control groups' (both versions), the lowest counts.
    """
    rooms = [MemoryLimit(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine")]
    if "SLURM_MEM_PER_NODE" in os.environ:
        rooms.append(MemoryLimit(int(os.environ["SLURM_MEM_PER_NODE"]) << 20, "this job"))
    elif "SLURM_MEM_PER_CPU" in os.environ:
        cpus = int(os.environ.get("SLURM_CPUS_ON_NODE", "1"))
        rooms.append(MemoryLimit(cpus * int(os.environ["SLURM_MEM_PER_CPU"]) << 20, "this job"))
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            mount = Path("/sys/fs/cgroup") / controllers
            group = mount / path.lstrip("/")
            # A group's limit holds for all below it. In a container the path may be the host's, and only the top there.
            for folder in (group, *(parent for parent in group.parents if parent.is_relative_to(mount))):
                for limit in (folder / "memory.max", folder / "memory.limit_in_bytes"):
                    if limit.exists() and (size := limit.read_text().strip()).isdigit():
                        rooms.append(MemoryLimit(int(size), "this process's control group"))
    room = min(room for room in rooms if room.size > 0)
    if processes == 1:
        return room
    return MemoryLimit(room.size // processes, f"each of the {processes} processes on {room.owner}")


def private_memory() -> int:
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
