"""Checks of the machine: versions and hardware."""

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pipeline.preflight.check_result import CheckResult

if TYPE_CHECKING:
    from pipeline.runtime.slurm import JobStep


def machine(step: "JobStep | None" = None) -> Iterator[CheckResult]:
    """Versions and hardware."""
    from importlib.metadata import version

    import torch

    python = sys.version_info
    yield CheckResult((3, 11) <= python[:2] < (3, 14), f"Python {python.major}.{python.minor} (3.11 to 3.13)")
    yield CheckResult(_release(torch.__version__) >= (2, 11), f"torch {torch.__version__} (2.11 to 2.13)")
    lightning = version("lightning")
    safe = _release(lightning) >= (2, 6, 6)
    yield CheckResult(safe, f"lightning {lightning}" + ("" if safe else ": unsafe; install lightning>=2.6.6"))
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            name, memory = (
                torch.cuda.get_device_name(index),
                torch.cuda.get_device_properties(index).total_memory,
            )
            yield CheckResult(True, f"GPU {index}: {name}, {memory / 2**30:.0f} GiB")
    else:
        from pipeline.training.precision import best_precision

        count = torch.cuda.device_count()  # the driver's
        cores = f"{f'{count} GPUs that torch cannot use' if count else 'no GPU'}; {os.cpu_count()} CPU cores"
        yield CheckResult(True, f"{cores}, precision {best_precision('cpu')} unless a recipe gives another")
    if step is not None:
        from pipeline.preflight.distributed import gpus

        usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
        yield from gpus(step, usable, os.environ.get("SLURM_GPUS_ON_NODE"))


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:3] if part.isdigit())
