"""Whether training uses torch.compile, and the compiler's worker processes."""

import os
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

from data_module.batching.stateful_loader import signals_blocked


def should_compile(requested: bool | None, accelerator: Any) -> bool:
    """Return whether to train with torch.compile: as `run.compile` says, or if null on a GPU where that is possible.

    Args:
        requested: `run.compile`.
        accelerator: `trainer.accelerator`.

    Raises InputError when it is requested but a compiler or Python's C headers are missing.
    """
    import torch

    from data_module.errors import InputError

    on_gpu = accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    if requested is False or (requested is None and not on_gpu):
        return False
    # On a GPU the compiler is needed for the code that launches kernels.
    variable, names = ("CC", ("gcc", "clang")) if on_gpu else ("CXX", ("g++", "clang++"))
    header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")  # Where Triton looks for it, too.
    if not os.environ.get(variable) and not any(map(shutil.which, names)):
        missing = f"torch.compile needs one of {', '.join(names)}, or {variable} set to a compiler"
    elif not header.exists():
        missing = f"torch.compile needs Python's C headers, python3-dev or python3-devel, and {header} is missing"
    else:
        return True
    if requested:
        raise InputError(f"run.compile: {missing}; install what is missing, or set run.compile to false")
    print(f"training without torch.compile, which is slower: {missing}", file=sys.stderr)
    return False


def start_compiler() -> None:
    """Start the processes that compile GPU kernels, with stop signals blocked in them.

    A process killed by a signal would never return its kernel, and a run that has to save and stop would wait for it.
    """
    from pipeline.compat.pytorch import start_compile_workers

    with signals_blocked():
        start_compile_workers()
