"""Whether training uses torch.compile, where compiled code is kept, and the compiler's worker processes."""

import os
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

from data_module.worker_processes import signals_blocked
from pipeline.runtime.compiled_code import compiled_code_folder


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
    missing = missing_compiler(on_gpu)
    if missing is None:
        return True
    if requested:
        raise InputError(f"run.compile: torch.compile {missing}; install what is missing, or set run.compile to false")
    print(f"training without torch.compile, which is slower: it {missing}", file=sys.stderr)
    return False


def missing_compiler(on_gpu: bool) -> str | None:
    """Return what compilation needs and does not find, as a predicate: "needs ..."; None if nothing is missing."""
    # On a GPU the compiler is needed for the code that launches kernels.
    variable, names = ("CC", ("gcc", "clang")) if on_gpu else ("CXX", ("g++", "clang++"))
    header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")  # Where Triton looks for it, too.
    if not os.environ.get(variable) and not any(map(shutil.which, names)):
        return f"needs one of {', '.join(names)}, or {variable} set to a compiler"
    if not header.exists():
        return f"needs Python's C headers, python3-dev or python3-devel, and {header} is missing"
    return None


def keep_compiled_code() -> None:
    """Set the folder of the compilers' caches to one that outlives the job, unless the user has set it.

    See `compiled_code_folder`. Has to be called before anything is compiled.

    Raises InputError if there is no safe folder.
    """
    from data_module.errors import InputError
    from pipeline.compat.pytorch import default_compiler_cache

    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", "") not in ("", default_compiler_cache()):
        return
    try:
        folder = compiled_code_folder()
    except OSError as error:
        raise InputError(f"{error}; set TORCHINDUCTOR_CACHE_DIR to a folder that only you can write to") from None
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))


def start_compiler() -> None:
    """Start the processes that compile GPU kernels, with stop signals blocked in them.

    A process killed by a signal would never return its kernel, and a run that has to save and stop would wait for it.
    """
    from pipeline.compat.pytorch import start_compile_workers

    keep_compiled_code()
    with signals_blocked():
        start_compile_workers()
