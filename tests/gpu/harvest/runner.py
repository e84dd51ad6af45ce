"""Runs the stages in turn, each in its own process group, which is killed at its time limit."""

import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.gpu.harvest.results import Results

ROOT = Path(__file__).resolve().parents[3]
LIMITS = {"rates": 25, "gpu_tests": 80, "attention": 75, "loss": 35, "base": 165, "big": 120, "decoding": 35}
"""Time limit of each stage in seconds, in the order in which they run."""
TAIL_LINES = 25


def run_stage(command: Sequence[str], seconds: float, log: Path) -> dict[str, Any]:
    """Run a command with its output appended to `log`, and kill it and its children after `seconds`.

    Returns:
        `outcome`, which is `done`, `timed out` or `failed`, and `seconds`; the last lines of output unless it is done.
    """
    start = time.monotonic()
    with log.open("ab") as output:
        before = output.tell()
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code: int | None = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _kill_group(process)
    outcome = "timed out" if code is None else "failed" if code else "done"
    found: dict[str, Any] = {"outcome": outcome, "seconds": round(time.monotonic() - start, 2), "limit": seconds}
    if outcome != "done":
        with log.open("rb") as output:
            output.seek(before)
            found |= {
                "exit_code": code,
                "last_lines": output.read().decode(errors="replace").splitlines()[-TAIL_LINES:],
            }
    return found


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its children, which may outlive it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def harvest(limits: dict[str, float], output: Path, options: list[str], revision: str | None) -> dict[str, Any]:
    """Run the stages of `limits`, given in seconds, and write the report after each. Return the last report."""
    results, log = Results(output.with_suffix(".jsonl")), output.with_suffix(".log")
    output.parent.mkdir(parents=True, exist_ok=True)
    for old in (output, results.path, log):
        old.unlink(missing_ok=True)
    about: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "revision": revision or _revision(),
        "sources_sha256": _hash_of_sources(),
        "machine": _machine(),
    }
    outcomes: dict[str, dict[str, Any]] = {}
    for stage, limit in limits.items():
        command = [sys.executable, "-m", "tests.gpu.harvest", "--output", str(output.resolve()), *options]
        print(f"{stage}: at most {limit:.0f} s", file=sys.stderr, flush=True)
        outcomes[stage] = {"outcome": "not ended"}
        write_report(output, about, outcomes, results)
        try:
            outcomes[stage] = run_stage([*command, "--one-stage", stage], limit, log)
        finally:
            report = write_report(output, about, outcomes, results)
        print(f"{stage}: {outcomes[stage]['outcome']}, {outcomes[stage]['seconds']} s", file=sys.stderr, flush=True)
    return report


def write_report(
    output: Path, about: dict[str, Any], outcomes: dict[str, dict[str, Any]], results: Results
) -> dict[str, Any]:
    """Write all results so far to one JSON file."""
    found = results.read()
    software = next((one for one in found if one["name"] == "software"), {})
    report = {
        **about,
        **{key: value for key, value in software.items() if key not in ("stage", "name")},
        "stages": {stage: outcome | _of_stage(found, stage) for stage, outcome in outcomes.items()},
    }
    part = output.with_name(output.name + ".part")
    part.write_text(json.dumps(report, indent=1) + "\n")
    part.replace(output)
    return report


def _of_stage(found: list[dict[str, Any]], stage: str) -> dict[str, Any]:
    """Return a stage's results, and the number of those that contain only a reason for failure."""
    results = [
        {key: value for key, value in one.items() if key != "stage"}
        for one in found
        if one["stage"] == stage and one["name"] != "software"
    ]
    return {"refused": sum("refused" in one for one in results), "results": results}


def _said(*command: str) -> str | None:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _revision() -> str | None:
    """Return the checkout's revision, marked if files were changed; None if this is not a checkout."""
    revision = _said("git", "rev-parse", "HEAD")
    if revision is None:
        return None
    return revision + ("+changes" if _said("git", "status", "--porcelain", "--untracked-files=no") else "")


def _hash_of_sources() -> str:
    """Return a hash that identifies the code without a checkout."""
    whole = hashlib.sha256()
    for package in ("data_module", "model", "pipeline", "tests/gpu"):
        for path in sorted((ROOT / package).glob("**/*.py")):
            whole.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return whole.hexdigest()


def _machine() -> dict[str, Any]:
    driver = Path("/proc/driver/nvidia/version")
    asked = "name,driver_version,memory.total,clocks.sm,clocks.max.sm,power.limit"
    return {
        "system": platform.platform(),
        "processors": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "driver": driver.read_text() if driver.exists() else None,
        "nvidia_smi": {"asked": asked, "said": _said("nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader")},
    }
