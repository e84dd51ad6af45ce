"""Private API of PyTorch that `pipeline` uses; that of the network is in `model/torch_private.py`.

Each docstring names the public interface that the function stands for, and the versions in which the private one was
found. `tests/pipeline/test_private_api.py` fails when PyTorch moves one of them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def default_store() -> dist.Store:
    """Return the key-value store of the default process group.

    Public: none; the store is created inside `init_process_group`. Seen in 2.11 to 2.13.
    """
    return dist.distributed_c10d._get_default_store()


def call_after_backward(loss: Tensor, callback: Callable[[], None]) -> None:
    """Call `callback` once the next backward pass from `loss` has computed all gradients of this process.

    Under DDP this is before the pass waits for the gradients of other ranks: the engine calls callbacks in the order in
    which they were queued, and DDP queues its own with the last gradient. On a GPU the current stream is that of the
    caller of the backward pass, but the thread may be another one.

    Public: none; `Tensor.register_hook` on every parameter would cost a Python call each. Seen in 2.11 to 2.13.
    """

    def queue(gradient: Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    loss.register_hook(queue)


def start_compile_workers() -> None:
    """Start the processes that compile kernels.

    Public: none; they start with the first kernel. Seen in 2.11 to 2.13.
    """
    from torch._inductor.async_compile import AsyncCompile  # Inductor takes a second to import.

    AsyncCompile.warm_pool()


def default_compiler_cache() -> str:
    """Return the folder that PyTorch sets TORCHINDUCTOR_CACHE_DIR to when it is imported, unless it is set.

    Public: none; after the import, the variable does not tell who set it. Seen in 2.11 to 2.13.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # as above

    return default_cache_dir()


def save_programs(file: BinaryIO, programs: dict[str, "ExportedProgram"], extra_files: dict[str, str]) -> None:
    """Write several exported programs into one archive.

    Public: `torch.export.save`, which takes one program. Seen in 2.11 to 2.13.
    """
    from torch.export.pt2_archive._package import package_pt2  # Training needs none of it.

    package_pt2(file, exported_programs=programs, extra_files=extra_files)


def load_programs(path: Path) -> dict[str, "ExportedProgram"]:
    """Read what `save_programs` wrote. Public: `torch.export.load`, for one program. Seen in 2.11 to 2.13."""
    from torch.export.pt2_archive._package import load_pt2  # as above

    return load_pt2(str(path)).exported_programs
