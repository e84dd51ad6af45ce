"""Host memory: how much this process uses, may use, and returns to the system."""

import ctypes
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""Parameters of glibc's `mallopt`."""
_RESIDENT_PEAK_RESET = Path("/proc/self/clear_refs")


def keep_freed_memory() -> None:
    """Keep freed memory in this process for reuse.

    By default glibc returns large blocks to the system at once, which zeroes each page when it is used again: up to a
    fifth of a step on a CPU. With another allocator this does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_MMAP_MAX, 0)


def release_freed_memory() -> None:
    """Return freed memory to the system. After `keep_freed_memory`, blocks of changing sizes leave ever more gaps."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def limit_onednn_cache() -> None:
    """Limit oneDNN's cache of prepared matrix products; call this before the first product.

    A product is prepared for one number of rows, which changes in each step of a search. oneDNN keeps 1,024 of them,
    and so does PyTorch's interface to it: together half a gigabyte. The time to prepare one again is negligible
    beside the product itself.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "16")


class MemoryLimit(NamedTuple):
    """How much memory a process may use, and what sets the limit."""

    size: int
    """Bytes."""
    owner: str


def host_memory_limit(processes: int) -> MemoryLimit:
    """Return the even share of the node's memory that each of `processes` may use, or what this one may use if less.

    The lowest of the machine's memory, SLURM's limit and the limits of the control groups (versions 1 and 2) applies;
    for a process, also those of `ulimit`.
    """
    limits = [MemoryLimit(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine")]
    if "SLURM_MEM_PER_NODE" in os.environ:
        limits.append(MemoryLimit(int(os.environ["SLURM_MEM_PER_NODE"]) << 20, "this job"))
    elif "SLURM_MEM_PER_CPU" in os.environ:
        cpus = int(os.environ.get("SLURM_CPUS_ON_NODE", "1"))
        limits.append(MemoryLimit(cpus * int(os.environ["SLURM_MEM_PER_CPU"]) << 20, "this job"))
    groups = Path("/proc/self/cgroup")
    for line in groups.read_text(encoding="utf-8").splitlines() if groups.exists() else ():  # not Linux
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            mount = Path("/sys/fs/cgroup") / controllers
            group = mount / path.lstrip("/")
            # A limit applies to all groups below it. In a container the path may be the host's and not exist.
            for folder in (group, *(parent for parent in group.parents if parent.is_relative_to(mount))):
                for file in (folder / "memory.max", folder / "memory.limit_in_bytes"):
                    if file.exists() and (size := file.read_text(encoding="utf-8").strip()).isdigit():
                        limits.append(MemoryLimit(int(size), "this process's control group"))
    lowest = min(limit for limit in limits if limit.size > 0)
    if processes > 1:
        lowest = MemoryLimit(lowest.size // processes, f"each of the {processes} processes on {lowest.owner}")
    kinds = {"v": resource.RLIMIT_AS, "d": resource.RLIMIT_DATA}
    own = [MemoryLimit(resource.getrlimit(kind)[0], f"this process (ulimit -{name})") for name, kind in kinds.items()]
    return min([lowest, *(limit for limit in own if limit.size != resource.RLIM_INFINITY)])


def private_memory() -> int:
    """Return the bytes of resident memory that belong to this process and not to a file."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text(encoding="utf-8").split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def can_measure_peak() -> bool:
    """Return whether the kernel can measure a peak of resident memory (Linux)."""
    return _RESIDENT_PEAK_RESET.exists()


def peak_during(work: Callable[[], None]) -> int:
    """Run `work`; return the peak of resident memory during it, in bytes."""
    _RESIDENT_PEAK_RESET.write_text("5", encoding="utf-8")
    work()
    return resident_peak()


def resident_peak() -> int:
    """Return the peak of this process's resident memory so far, in bytes.

    `ru_maxrss` is no such figure: it begins with the size of the process that has started this one.
    """
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmHWM:")[1].split()[0]) << 10
