"""Names the rank that failed, and its node, in the error of every rank."""

import threading
import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from pipeline.compat.pytorch import default_store
from pipeline.runtime.launch import node_name

ANSWER_SECONDS = 3.0
"""How long a rank waits for the others to report that they have failed too."""


class FailureReport:
    """Where each rank runs, and which one failed first.

    Ranks report through the process group's key-value store, which rank 0 hosts: no other rank has to take part.
    """

    def __init__(self) -> None:
        self._rank, size = dist.get_rank(), dist.get_world_size()
        self._store = dist.PrefixStore("FailureReport", default_store())
        nodes: list[str] = [""] * size
        dist.all_gather_object(nodes, node_name())
        self._names = [f"rank {rank} on {node}" for rank, node in enumerate(nodes)]

    def check_same_step(self, step: int) -> None:
        """Raise RuntimeError when ranks have resumed from different checkpoints; all ranks call it.

        Each rank looks for the newest checkpoint itself, and another job may have been saving one meanwhile.
        """
        steps: list[int] = [0] * len(self._names)
        dist.all_gather_object(steps, step)
        others = [rank for rank, theirs in enumerate(steps) if theirs != steps[0]]
        if others:
            raise RuntimeError(
                f"{self._names[0]} resumed from step {steps[0]}, {self._names[others[0]]} from {steps[others[0]]}: "
                "another job was still writing to the run folder; start again"
            )

    def describe(self, error: BaseException) -> str:
        """Say which rank failed and where, as far as this rank can tell; waits a few seconds for reports of others."""
        here = self._names[self._rank]
        if not is_collective_error(error):
            first_line = str(error).splitlines()[:1]
            self._post(f"failed|{type(error).__name__}: {first_line[0] if first_line else ''}")
            return f"{here} failed"
        self._post("waiting|")
        reports = self._collect()
        if reports is None:
            return f"{self._names[0]} has died or hangs; {here} waited for it"
        for rank, report in reports.items():
            kind, _, message = report.partition("|")
            if kind == "failed":
                return f"{self._names[rank]} failed: {message}"
        silent = [name for rank, name in enumerate(self._names) if rank not in reports]
        return f"{', '.join(silent) or 'no rank'} has died or hangs; {here} waited for it"

    def _post(self, report: str) -> None:
        self._store.set_timeout(timedelta(seconds=ANSWER_SECONDS))
        try:
            self._store.set(str(self._rank), report)
        except (RuntimeError, dist.DistError):
            return

    def _collect(self) -> dict[int, str] | None:
        """Return every rank's report so far; None if the store, and with it rank 0, does not answer."""
        answers: list[dict[int, str]] = []

        def ask() -> None:
            with suppress(RuntimeError, dist.DistError):
                answers.append(self._wait_for_reports())

        # A store that hangs, or whose link was cut, never returns.
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(2 * ANSWER_SECONDS)
        return answers[0] if answers else None

    def _wait_for_reports(self) -> dict[int, str]:
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            posted = [rank for rank in range(len(self._names)) if self._store.check([str(rank)])]
            reports = {rank: self._store.get(str(rank)).decode() for rank in posted}
            failed = any(report.startswith("failed") for report in reports.values())
            if failed or len(reports) == len(self._names) or time.monotonic() > deadline:
                return reports
            time.sleep(0.1)


def is_collective_error(error: BaseException) -> bool:
    """Return whether a collective failed, rather than this rank's own work."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower() or "nccl" in str(error).lower()
