"""A copy of a checkpoint's contents in host memory, from which the file is written while training goes on."""

import copy
import mmap
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pipeline.runtime.memory import can_measure_peak, host_memory_limit, private_memory

_ALIGNMENT = 64
"""Storages begin at multiples of this many bytes."""


class HostCopy:
    """One block of host memory, reserved once and used for every copy.

    The block is no part of the allocator's memory, and processes that are forked do not get it: a loader worker would
    otherwise keep the pages that it was forked with, which doubles the memory.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._pinned = False
        self._processes = 1
        self.refusal = "no memory was reserved"
        """Why there is no block."""

    @property
    def size(self) -> int:
        """Bytes of the block; 0 if there is none."""
        return len(self._memory) if self._memory is not None else 0

    def reserve(self, size: int, processes: int, pinned: bool) -> bool:
        """Replace the block by one of `size` bytes, whose pages are in memory; return whether there was room for it.

        Args:
            size: bytes.
            processes: how many processes share the node's memory; see `host_memory_limit`.
            pinned: pin the block, so that GPUs copy to it without a detour.
        """
        self.release()
        self._processes = processes
        if not can_measure_peak():
            self.refusal = "this system does not say how much memory a process takes"
            return False
        limit = host_memory_limit(processes)
        self.refusal = f"a copy of {size / 1e6:,.0f} MB does not fit, {limit.owner} has {limit.size / 1e6:,.0f} MB"
        if private_memory() + size > limit.size:
            return False
        try:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
            self._memory = mmap.mmap(-1, size, flags=flags)
        except OSError:
            return False
        self._memory.madvise(mmap.MADV_DONTFORK)
        self._pinned = pinned and int(torch.cuda.cudart().cudaHostRegister(self._address(), size, 0)) == 0
        return True

    def release(self) -> bool:
        """Give the block back; return whether there was one. No copy may be in use."""
        if self._memory is None:
            return False
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._address())
        self._memory, self._pinned = None, False
        return True

    def take(self, contents: dict[str, Any]) -> dict[str, Any] | None:
        """Return a copy of a checkpoint's contents that nothing changes before the next call.

        Tensors that share a storage share one in the copy, so that a file of the copy is that of the contents. A copy
        that is larger than the block, because of an optimizer with more state than Adam, gets a larger block. None if
        there is no room for it.
        """
        if self._memory is None:
            return None
        tensors = [tensor for tensor in _tensors(contents) if _is_plain(tensor)]
        storages = {_key(tensor.untyped_storage()): tensor.untyped_storage() for tensor in tensors}
        needed = sum(_aligned(storage.nbytes()) for storage in storages.values())
        if needed > self.size and not self.reserve(needed, self._processes, self._pinned):
            return None
        copies, offset = {}, 0
        for key, storage in storages.items():
            copies[key] = self._copy(storage, offset)
            offset += _aligned(storage.nbytes())
        if any(tensor.is_cuda for tensor in tensors):
            torch.cuda.synchronize()
        memo: dict[int, Any] = {}
        for tensor in tensors:
            place = copies[_key(tensor.untyped_storage())], tensor.storage_offset(), tensor.size(), tensor.stride()
            memo[id(tensor)] = torch.empty(0, dtype=tensor.dtype).set_(*place)
        # `deepcopy` copies what else may change, and takes the tensors from its memo.
        return copy.deepcopy(contents, memo)

    def _copy(self, storage: torch.UntypedStorage, offset: int) -> torch.UntypedStorage:
        if not storage.nbytes():
            return torch.UntypedStorage(0)
        assert self._memory is not None
        target = torch.frombuffer(self._memory, dtype=torch.uint8, count=storage.nbytes(), offset=offset)
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        target.copy_(source, non_blocking=True)
        return target.untyped_storage()

    def _address(self) -> int:
        assert self._memory is not None
        return torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested dictionaries, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is a view of its storage and nothing else; `deepcopy` copies others by itself."""
    special = tensor.requires_grad or tensor.is_conj() or tensor.is_neg()
    return type(tensor) is Tensor and tensor.layout == torch.strided and not special


def _key(storage: torch.UntypedStorage) -> tuple[torch.device, int, int]:
    """Return what equals only for tensors of one storage."""
    return storage.device, storage.data_ptr(), storage.nbytes()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
