"""The command line, and the processes of the stages; see the package."""

import argparse
import faulthandler
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch.utils.collect_env import get_pretty_env_info

from tests.gpu.harvest.job import Job, append

ROOT = Path(__file__).resolve().parents[3]
STAGES = {
    "rates": ("operations", 25),
    "gpu_tests": (None, 60),
    "other_tests": (None, 20),
    "attention": ("operations", 75),
    "loss": ("operations", 35),
    "base": ("training", 165),
    "big": ("training", 120),
    "decoding": ("operations", 35),
}
"""Module of each stage and its time limit in seconds, in the order in which the stages run."""
PYTEST = ["-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
PYTEST += ["--ignore=tests/gpu/test_harvest.py", "tests/gpu"]
TESTS = {
    "gpu_tests": ["tests/model/test_compilation.py", "tests/model/test_decoding_everywhere.py", "-m=gpu and not slow"],
    "other_tests": ["-m=not gpu and not slow"],
}
"""Arguments of pytest, whose output is in the log."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.harvest", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="a file of JSON lines; .log is written beside it")
    parser.add_argument("--stages", default=",".join(STAGES), help="comma-separated stages (default: %(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="very small sizes, to check that the code runs")
    parser.add_argument("--revision", help="revision of the code, if this is not a checkout")
    parser.add_argument("--limit-factor", type=float, default=1.0, help="multiplies each stage's time limit")
    parser.add_argument("--one-stage", choices=STAGES, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one_stage:
        faulthandler.enable()  # if a stage hangs or crashes, the log shows where
        faulthandler.dump_traceback_later(max(1.0, STAGES[options.one_stage][1] * options.limit_factor - 3.0))
        run_one(options.one_stage, options.output, options.device, options.tiny)
        faulthandler.cancel_dump_traceback_later()
        return 0
    stages = options.stages.split(",")
    if unknown := [stage for stage in stages if stage not in STAGES]:
        parser.error(f"unknown stage: {', '.join(unknown)}; use {', '.join(STAGES)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the running stage is killed too
    log = options.output.with_suffix(".log")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    for old in (options.output, log):
        old.unlink(missing_ok=True)
    about = machine()
    about["revision"] = options.revision or about["revision"]
    append(options.output, "harvest", "machine", **about)
    outcomes = []
    for stage in stages:
        limit = STAGES[stage][1] * options.limit_factor
        print(f"{stage}: at most {limit:.0f} s", file=sys.stderr, flush=True)
        own = ["-m", "tests.gpu.harvest", *arguments, "--one-stage", stage, "--output", str(options.output.resolve())]
        outcome = run_stage([sys.executable, *([*PYTEST, *TESTS[stage]] if stage in TESTS else own)], limit, log)
        append(options.output, stage, "outcome", **outcome)
        print(f"{stage}: {outcome['outcome']}, {outcome['seconds']} s", file=sys.stderr, flush=True)
        outcomes.append(outcome["outcome"])
    return 0 if set(outcomes) == {"done"} else 1


def run_one(stage: str, output: Path, device: str, tiny: bool) -> None:
    job = Job(stage, output, torch.device(device), tiny)
    module = importlib.import_module(f"tests.gpu.harvest.{STAGES[stage][0]}")
    with torch.compiler.set_stance("force_eager" if tiny else "default"):
        getattr(module, f"run_{stage}")(job)


def run_stage(command: Sequence[str], seconds: float, log: Path) -> dict[str, Any]:
    """Run a command with its output appended to `log`, and kill it and its children after `seconds`.

    Returns:
        `outcome`, which is `done`, `timed out` or `failed`, and `seconds`; the last lines of output unless it is done.
    """
    start = time.monotonic()
    with log.open("a+b") as output:
        before = output.tell()
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        code = None
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout=seconds)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its children too, which may outlive it
            process.wait()
        outcome = "timed out" if code is None else "failed" if code else "done"
        found = {"outcome": outcome, "seconds": round(time.monotonic() - start, 2), "limit": seconds}
        if outcome == "done":
            return found
        output.seek(before)
        return {**found, "exit_code": code, "last_lines": output.read().decode(errors="replace").splitlines()[-25:]}


def machine() -> dict[str, Any]:
    """Return date, revision of the checkout, what PyTorch finds on this machine, and the GPU's clocks and power."""
    asked = "name,driver_version,memory.total,clocks.sm,clocks.max.sm,power.limit"
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "revision": said("git", "describe", "--always", "--abbrev=40", "--dirty"),
        "environment": get_pretty_env_info().splitlines(),
        "gpu": {"asked": asked, "said": said("nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader")},
    }


def said(*command: str) -> str | None:
    """Return what a command prints, or None if it fails."""
    try:
        return subprocess.check_output(command, cwd=ROOT, stderr=subprocess.DEVNULL, text=True, timeout=20).strip()
    except (OSError, subprocess.SubprocessError):
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
