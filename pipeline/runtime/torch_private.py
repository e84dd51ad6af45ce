"""Private API of PyTorch that `pipeline` uses; that of the network is in `model/torch_private.py`.

Each docstring names the public interface that the function stands for, and the versions in which the private one was
found. `tests/pipeline/test_private_api.py` fails if PyTorch changes one of them.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor


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

    Public: none; after the import, the variable does not show whether the user set it. Seen in 2.11 to 2.13.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # as above

    return default_cache_dir()


def archived_pickle(path: Path) -> bytes:
    """Return the pickle in an archive of `torch.save`; raise RuntimeError if there is none.

    Public: none. Another reader may find another pickle in a crafted archive; this one is that of `torch.load`. Seen in
    2.11 to 2.13.
    """
    return torch._C.PyTorchFileReader(str(path)).get_record("data.pkl")


def has_while_loop() -> bool:
    """Return whether this version of PyTorch can export a loop and save it."""
    return torch.__version__ >= "2.12"


def while_loop(
    condition: Callable[..., Tensor],
    body: Callable[..., Sequence[Tensor]],
    state: Sequence[Tensor],
    constants: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """Call `body` as often as `condition` says, as one operator of an exported program, and return the last state.

    Args:
        condition: takes the tensors of the state and the constants, and returns a bool tensor [].
        body: takes them and returns new tensors of the state, of the same shapes and types.
        state: tensors.
        constants: tensors that every call gets as they are.

    Public: none; `torch._higher_order_ops.while_loop` itself runs Dynamo, which cannot record a state whose number of
    sentences depends on values. Seen in 2.12 to 2.13.
    """
    from torch._higher_order_ops.while_loop import while_loop_op  # Training needs none of it.

    return while_loop_op(condition, body, tuple(state), tuple(constants))  # type: ignore[arg-type]
