"""The start records of a run, in starts.jsonl: one for each process that has started or resumed it."""

import json
import subprocess
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from pipeline.checkpointing.run_folder import STARTS
from pipeline.monitoring.run_log import RunLog
from pipeline.runtime.launch import JobStep, node_name


def record_start(log: RunLog, job: JobStep | None, backend: dict[str, str]) -> list[dict[str, Any]]:
    """Append the record of this start, and return all records of the run, the oldest first.

    `submitted` and `began` are seconds since the epoch; `submitted` is when the job was put into the queue.
    `backend` is how it computes, by part.
    """
    now = time.time()
    start = {
        "submitted": min(_submit_time(job.job), now) if job else now,
        "began": now,
        "step": log.step,
        "host": node_name(),
        "job": job.job if job else None,
        "restarts": job.restarts if job else 0,
        "backend": backend,
    }
    earlier = _read(log.run / STARTS)
    log.append(STARTS, start)
    return [*earlier, start]


def first_submission(starts: list[dict[str, Any]]) -> float:
    """Return when the run was first submitted, in seconds since the epoch."""
    return min(start["submitted"] for start in starts)


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return []


def _submit_time(job: str) -> float:
    """Return when a job was last put into the queue; the current time if SLURM does not answer."""
    try:
        command = ["scontrol", "show", "job", "--oneliner", job]
        output = subprocess.run(command, capture_output=True, encoding="utf-8", check=True, timeout=20).stdout
        fields = dict(field.partition("=")[::2] for field in output.split())
        return datetime.fromisoformat(fields["SubmitTime"]).timestamp()
    except (OSError, subprocess.SubprocessError, KeyError, ValueError):
        return time.time()
