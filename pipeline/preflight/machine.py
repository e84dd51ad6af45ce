"""Checks of the machine: package versions and devices."""

import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from pipeline.preflight.check_result import CheckResult

if TYPE_CHECKING:
    from pipeline.runtime.launch import JobStep


def check_machine(job: "JobStep | None" = None) -> Iterator[CheckResult]:
    """Run all checks of the machine; `job` is the SLURM job step of this process, None outside a job."""
    for check in CHECKS:
        yield from check(job)


def check_python(job: "JobStep | None") -> Iterator[CheckResult]:
    """Check the version of Python."""
    python = sys.version_info
    yield CheckResult((3, 11) <= python[:2] < (3, 14), f"Python {python.major}.{python.minor} (needs 3.11 to 3.13)")


def check_packages(job: "JobStep | None") -> Iterator[CheckResult]:
    """Check the versions of torch and Lightning."""
    from importlib.metadata import version

    import torch

    supported = (2, 11) <= _version_numbers(torch.__version__)[:2] <= (2, 13)
    yield CheckResult(supported, f"torch {torch.__version__} (needs 2.11 to 2.13)")
    lightning = version("lightning")
    safe = _version_numbers(lightning) >= (2, 6, 6)
    yield CheckResult(safe, f"lightning {lightning}" + ("" if safe else " is unsafe; install lightning>=2.6.6"))


def check_devices(job: "JobStep | None") -> Iterator[CheckResult]:
    """List the devices; in a job, check that each task has one GPU."""
    import torch

    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            memory = torch.cuda.get_device_properties(index).total_memory / 2**30
            yield CheckResult(True, f"GPU {index}: {torch.cuda.get_device_name(index)}, {memory:.0f} GiB")
    else:
        from pipeline.runtime.devices import best_precision

        count = torch.cuda.device_count()  # as the driver reports it
        gpus = f"{count} GPUs that torch cannot use" if count else "no GPU"
        yield CheckResult(True, f"{gpus}; {os.cpu_count()} CPU cores, default precision {best_precision('cpu')}")
    if job is not None:
        visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
        yield from check_gpus_per_task(job, visible, os.environ.get("SLURM_GPUS_ON_NODE"))


def check_gpus_per_task(job: "JobStep", visible: int, allocated: str | None) -> Iterator[CheckResult]:
    """Check that torch sees all GPUs of the node that SLURM allocated, and that there is one per task.

    Args:
        job: the SLURM job step of this process.
        visible: number of GPUs that torch sees.
        allocated: SLURM_GPUS_ON_NODE, if it is set.
    """
    from pipeline.runtime.devices import gpus_mistake

    if mistake := gpus_mistake(job, visible, allocated):
        yield CheckResult(False, mistake)


def check_min_nodes(job: "JobStep | None") -> Iterator[CheckResult]:
    """Check the number of nodes that the job script needs to go on after a failure."""
    from pipeline.runtime.launch import min_nodes_mistake

    if job is not None and (mistake := min_nodes_mistake(job)):
        yield CheckResult(False, mistake)


CHECKS: tuple[Callable[["JobStep | None"], Iterator[CheckResult]], ...] = (
    check_python,
    check_packages,
    check_devices,
    check_min_nodes,
)


def _version_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:3] if part.isdigit())
