"""The command line; see the package."""

import argparse
import faulthandler
import signal
import sys
from pathlib import Path

from tests.gpu.harvest.results import Results
from tests.gpu.harvest.runner import LIMITS, harvest


def main(arguments: list[str] | None = None) -> int:
    """Run the requested stages, or a single stage in this process."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.harvest", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="a JSON file; .jsonl and .log are written beside it")
    parser.add_argument("--stages", help=f"comma-separated stages, of {','.join(LIMITS)} (default: all)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="very small sizes, to check that the code runs")
    parser.add_argument("--revision", help="revision of the code, if this is not a checkout")
    parser.add_argument("--limit-factor", type=float, default=1.0, help="multiplies each stage's time limit")
    parser.add_argument("--one-stage", choices=LIMITS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one_stage:
        # If a stage hangs or crashes, the log shows where.
        faulthandler.enable()
        faulthandler.dump_traceback_later(max(1.0, LIMITS[options.one_stage] * options.limit_factor - 3.0))
        run_one(options.one_stage, options.output, options.device, options.tiny)
        faulthandler.cancel_dump_traceback_later()
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the running stage is killed too
    stages = options.stages.split(",") if options.stages else list(LIMITS)
    if unknown := [stage for stage in stages if stage not in LIMITS]:
        parser.error(f"unknown stage: {', '.join(unknown)}; use {', '.join(LIMITS)}")
    passed_on = ["--device", options.device, "--limit-factor", str(options.limit_factor), *["--tiny"] * options.tiny]
    limits = {stage: LIMITS[stage] * options.limit_factor for stage in stages}
    report = harvest(limits, options.output, passed_on, options.revision)
    return 0 if all(one["outcome"] == "done" for one in report["stages"].values()) else 1


def run_one(stage: str, output: Path, device: str, tiny: bool) -> None:
    """Run a stage in this process."""
    import torch

    from tests.gpu.harvest import attention, decoding, gpu_tests, loss, rates, training
    from tests.gpu.harvest.job import Job

    modules = {
        "rates": rates,
        "gpu_tests": gpu_tests,
        "attention": attention,
        "loss": loss,
        "base": training,
        "big": training,
        "decoding": decoding,
    }
    job = Job(stage, Results(output.with_suffix(".jsonl")), torch.device(device), tiny)
    job.record("software", **software(device))
    with torch.compiler.set_stance("force_eager" if tiny else "default"):
        modules[stage].run(job)


def software(device: str) -> dict[str, object]:
    """Return versions, and the device's properties."""
    import lightning
    import torch

    found: dict[str, object] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "lightning": lightning.__version__,
        "threads": torch.get_num_threads(),
        "device": "cpu",
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "device": properties.name,
            "device_memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "capability": list(torch.cuda.get_device_capability(0)),
        }
    return found


if __name__ == "__main__":
    sys.exit(main())
