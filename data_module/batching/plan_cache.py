"""Epoch plans, each computed once per node and memory-mapped by all its ranks and loader workers.

A plan is a file in a per-user folder of the node's temporary folder. The first process that needs a plan computes it;
the others wait, then map the same pages. A process holds a shared lock on the plans it uses, and the operating system
releases the locks of a killed process. Before a process writes a plan, it removes all plans that are not locked, which
bounds the disk space used.
"""

import fcntl
import hashlib
import logging
import mmap
import os
import stat
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from data_module.batching import batch_plan
from data_module.batching.batch_plan import EpochPlan, plan_epoch
from data_module.corpus.store import ParallelCorpus, lengths_with_eos

log = logging.getLogger(__name__)


class PlanCache:
    """Returns the plan of each epoch, and computes the next epoch's plan in the background."""

    def __init__(self, corpus: ParallelCorpus, *, batch_tokens: int, seed: int) -> None:
        self._corpus = corpus
        self._settings = {"batch_tokens": batch_tokens, "seed": seed}
        self._next: _PlanThread | None = None

    def get(self, epoch: int) -> EpochPlan:
        """Return the plan of an epoch. Raises `ValueError` as `plan_epoch` does."""
        thread = self._next if self._next is not None and self._next.epoch == epoch else _PlanThread(self._open, epoch)
        plan = thread.plan()
        self._next = _PlanThread(self._open, epoch + 1)
        return plan

    def discard_next(self) -> None:
        """Wait for the background thread and discard its plan. Call this before a fork, which copies no threads."""
        if self._next is not None:
            self._next.join()
        self._next = None

    def compute(self, epoch: int) -> EpochPlan:
        """Return the plan of an epoch in this process's own memory."""
        source, target = lengths_with_eos(self._corpus.source), lengths_with_eos(self._corpus.target)
        return plan_epoch(source, target, **self._settings, epoch=epoch)

    def _open(self, epoch: int) -> EpochPlan:
        # The plan depends on the code, numpy's version and the corpus.
        code = Path(batch_plan.__file__).read_bytes()
        key = repr((self._corpus.identity, sorted(self._settings.items()), epoch, np.__version__))
        name = hashlib.sha256(code + key.encode()).hexdigest()[:32]
        try:
            return shared_plan(_private_folder(), name, lambda: self.compute(epoch))
        except OSError as error:
            log.warning("this node's processes cannot share epoch plans (%s); each process computes its own", error)
            return self.compute(epoch)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_next": None}


class _PlanThread(threading.Thread):
    """Opens or computes one plan. It is a daemon, so that a process can exit without waiting for it."""

    def __init__(self, open_plan: Callable[[int], EpochPlan], epoch: int) -> None:
        super().__init__(daemon=True)
        self.epoch = epoch
        self._open_plan = open_plan
        self._plan: EpochPlan | None = None
        self._error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self._plan = self._open_plan(self.epoch)
        except Exception as error:
            self._error = error

    def plan(self) -> EpochPlan:
        self.join()
        if self._plan is None:
            raise self._error or RuntimeError("the thread returned no plan")
        return self._plan


def _map_plan(path: Path) -> EpochPlan:
    """Map the plan in a file, and lock it against removal for as long as this process uses it."""
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        # The map duplicates the file descriptor, which keeps the lock for as long as the map exists.
        return EpochPlan(np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint32))


def shared_plan(folder: Path, name: str, make: Callable[[], EpochPlan]) -> EpochPlan:
    """Map the plan of this name in the folder. If it does not exist, one of the calling processes computes it.

    Raises:
        OSError: the folder cannot be written.
    """
    path = folder / f"{name}.plan"
    try:
        return _map_plan(path)
    except FileNotFoundError:
        pass
    with (folder / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            if not path.exists():
                _remove_unused(folder)
                partial = folder / "partial"
                try:
                    make().numbers.tofile(partial)
                    partial.replace(path)
                finally:
                    partial.unlink(missing_ok=True)
            return _map_plan(path)
        finally:
            # Closing does not unlock the file if another thread has forked a process meanwhile, which has it open too.
            fcntl.flock(lock, fcntl.LOCK_UN)


def _remove_unused(folder: Path) -> None:
    """Remove plans that no process has locked."""
    for path in folder.glob("*.plan"):
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            path.unlink()
            fcntl.flock(file, fcntl.LOCK_UN)


def _private_folder() -> Path:
    """Return this user's folder in the node's temporary folder, which no other user may write to."""
    folder = Path(tempfile.gettempdir()) / f"epoch-plans-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise OSError(f"{folder} is not private to this user")
    return folder
