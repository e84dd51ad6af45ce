"""A run's starts: when it was asked for, and each process that has worked on it since."""

import json
import subprocess
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from pipeline.checkpointing.run_folder import STARTS
from pipeline.monitoring.run_log import RunLog
from pipeline.runtime.slurm import JobStep, node_name


def record_start(log: RunLog, job: JobStep | None) -> list[dict[str, Any]]:
    """Add this start to the run's; returns all of them, the oldest first.

    A start says when it began, and when its job was submitted, both in seconds since the epoch.
    """
    now = time.time()
    start = {
        "submitted": min(_submit_time(job.job), now) if job else now,
        "began": now,
        "step": log.step,
        "host": node_name(),
        "job": job.job if job else None,
        "restarts": job.restarts if job else 0,
    }
    earlier = _read(log.run / STARTS)
    log.append(STARTS, start)
    return [*earlier, start]


def first_submission(starts: list[dict[str, Any]]) -> float:
    """When the run was first asked for, in seconds since the epoch."""
    return min(start["submitted"] for start in starts)


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return []


def _submit_time(job: str) -> float:
    """Of a job, when it was last put into the queue; now where SLURM does not answer."""
    try:
        show = ["scontrol", "show", "job", "--oneliner", job]
        said = subprocess.run(show, capture_output=True, text=True, check=True, timeout=20).stdout
        fields = dict(field.partition("=")[::2] for field in said.split())
        return datetime.fromisoformat(fields["SubmitTime"]).timestamp()
    except (OSError, subprocess.SubprocessError, KeyError, ValueError):
        return time.time()
