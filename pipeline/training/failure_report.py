"""Names the rank that failed, and its node, in the error of every rank."""

import threading
import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from pipeline.runtime.slurm import node_name

ROLL_CALL_SECONDS = 3.0
"""How long the others have to say that they have failed too."""


class FailureReport:
    """Who is where, and who has failed first. Kept with the group's key-value store, which needs no other rank."""

    def __init__(self) -> None:
        self._rank, size = dist.get_rank(), dist.get_world_size()
        self._store = dist.PrefixStore("roll", dist.distributed_c10d._get_default_store())
        names: list[str] = [""] * size
        dist.all_gather_object(names, node_name())
        self._names = [f"rank {rank} on {name}" for rank, name in enumerate(names)]

    def compare(self, step: int) -> None:
        """Raises RuntimeError when ranks have not gone on from one checkpoint; all call it.

        Each has looked for the newest by itself, and another job may have been saving one meanwhile.
        """
        steps: list[int] = [0] * len(self._names)
        dist.all_gather_object(steps, step)
        others = [rank for rank, theirs in enumerate(steps) if theirs != steps[0]]
        if others:
            raise RuntimeError(
                f"{self._names[0]} went on from step {steps[0]}, {self._names[others[0]]} from {steps[others[0]]}: "
                "another job was still writing to the run folder; start again"
            )

    def call(self, error: BaseException) -> str:
        """Which rank has failed and where, as far as this one can tell; waits a few seconds for the others' word."""
        here = self._names[self._rank]
        if not is_collective_error(error):
            said = str(error).splitlines()[:1]
            self._tell(f"failed|{type(error).__name__}: {said[0] if said else ''}")
            return f"{here} failed"
        self._tell("waiting|")
        heard = self._listen()
        if heard is None:
            return f"{self._names[0]} has died or hangs; {here} waited for it"
        for rank, word in heard.items():
            kind, _, what = word.partition("|")
            if kind == "failed":
                return f"{self._names[rank]} failed: {what}"
        silent = [name for rank, name in enumerate(self._names) if rank not in heard]
        return f"{', '.join(silent) or 'no rank'} has died or hangs; {here} waited for it"

    def _tell(self, word: str) -> None:
        self._store.set_timeout(timedelta(seconds=ROLL_CALL_SECONDS))
        try:
            self._store.set(str(self._rank), word)
        except (RuntimeError, dist.DistError):
            return

    def _listen(self) -> dict[int, str] | None:
        """Every rank's word so far; None if the store does not answer, which lives in rank 0."""
        answers: list[dict[int, str]] = []

        def ask() -> None:
            with suppress(RuntimeError, dist.DistError):
                answers.append(self._words())

        # A store that hangs, or that a link was cut to, gives no answer ever.
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(2 * ROLL_CALL_SECONDS)
        return answers[0] if answers else None

    def _words(self) -> dict[int, str]:
        deadline = time.monotonic() + ROLL_CALL_SECONDS
        while True:
            there = [rank for rank in range(len(self._names)) if self._store.check([str(rank)])]
            heard = {rank: self._store.get(str(rank)).decode() for rank in there}
            told = any(word.startswith("failed") for word in heard.values())
            if told or len(heard) == len(self._names) or time.monotonic() > deadline:
                return heard
            time.sleep(0.1)


def is_collective_error(error: BaseException) -> bool:
    """Whether a collective has failed, and not this rank's own work."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower() or "nccl" in str(error).lower()
