"""Whether training uses torch.compile, and the compiler's worker processes."""

import os
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

from data_module.batching.stateful_loader import signals_blocked


def should_compile(asked: bool | None, accelerator: Any) -> bool:
    """Whether to train through torch.compile: as asked (`run.compile`), or else on a GPU where that is possible.

    Raises InputError when it is asked for where no compiler is, or Python's C headers are not.
    """
    import torch

    from data_module.errors import InputError

    on_gpu = accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    if asked is False or (asked is None and not on_gpu):
        return False
    # On a GPU only what starts a kernel is compiled by it, but that needs it nevertheless.
    variable, names = ("CC", ("gcc", "clang")) if on_gpu else ("CXX", ("g++", "clang++"))
    header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")  # where Triton looks, too
    if not os.environ.get(variable) and not any(map(shutil.which, names)):
        missing = f"torch.compile needs one of {', '.join(names)}, or {variable} set to a compiler"
    elif not header.exists():
        missing = f"torch.compile needs Python's C headers, python3-dev or python3-devel, and {header} is not there"
    else:
        return True
    if asked:
        raise InputError(f"run.compile: {missing}; see to that, or set run.compile to false")
    print(f"training is not compiled, which makes it slower: {missing}", file=sys.stderr)
    return False


def start_compiler() -> None:
    """Start the processes that compile kernels for a GPU, SLURM's signals held back.

    One that died of a signal would never give its kernel back, and a run that was to save and stop would wait for it.
    """
    from torch._inductor.async_compile import AsyncCompile

    with signals_blocked():
        AsyncCompile.warm_pool()
