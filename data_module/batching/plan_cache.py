"""The epochs' plans, each computed once a node, and mapped by all of its ranks and loader workers.

A plan lies in a file in the node's temporary folder, in a folder of its user's. Who needs one first computes it;
others wait, then map the same pages. A process holds a shared lock on the plans it uses, the system frees those of
a killed one, and whoever writes the next plan removes those that nobody holds: what stays behind is bounded.
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

from data_module.batching import batch_plan, shuffle
from data_module.batching.batch_plan import EpochPlan, plan_epoch
from data_module.corpus.store import ParallelCorpus, with_end_symbol

log = logging.getLogger(__name__)


class PlanCache:
    """Gives one epoch's plan after another, and computes the next in the background, before it is asked for."""

    def __init__(self, corpus: ParallelCorpus, *, batch_tokens: int, group_tokens: int, seed: int) -> None:
        self._corpus = corpus
        self._settings = {"batch_tokens": batch_tokens, "group_tokens": group_tokens, "seed": seed}
        self._next: _Opening | None = None

    def of(self, epoch: int) -> EpochPlan:
        """The epoch's plan; raises ValueError as `plan_epoch` does."""
        opening = self._next if self._next is not None and self._next.epoch == epoch else _Opening(self._open, epoch)
        plan = opening.plan()
        self._next = _Opening(self._open, epoch + 1)
        return plan

    def forget(self) -> None:
        """Wait for what is being computed, and let go of it. Call it before a fork, which no thread survives."""
        if self._next is not None:
            self._next.join()
        self._next = None

    def compute(self, epoch: int) -> EpochPlan:
        """The epoch's plan, in this process's own memory."""
        source, target = with_end_symbol(self._corpus.source), with_end_symbol(self._corpus.target)
        return plan_epoch(source, target, **self._settings, epoch=epoch)

    def _open(self, epoch: int) -> EpochPlan:
        # Other code, another numpy or another corpus make another plan.
        made_by = [Path(module.__file__ or "").read_bytes() for module in (batch_plan, shuffle)]
        key = repr((self._corpus.identity, sorted(self._settings.items()), epoch, np.__version__))
        name = hashlib.sha256(b"".join([*made_by, key.encode()])).hexdigest()[:32]
        try:
            return shared_plan(_own_folder(), name, lambda: self.compute(epoch))
        except OSError as error:
            log.warning("the epoch's plan is not shared by this node's processes (%s); each computes it", error)
            return self.compute(epoch)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_next": None}


class _Opening(threading.Thread):
    """A plan on its way. A daemon: a process that ends does not wait for it."""

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
            raise self._error or RuntimeError("a plan without a result")
        return self._plan


def _mapped(path: Path) -> EpochPlan:
    """The plan in a file, locked against removal as long as this process uses it."""
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        # The map has the file open a second time over: the lock lives as long as the map.
        return EpochPlan(np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint32))


def shared_plan(folder: Path, name: str, make: Callable[[], EpochPlan]) -> EpochPlan:
    """The plan of that name in the folder, made first if it is not there; of several processes one makes it.

    Raises OSError when the folder cannot be written.
    """
    path = folder / f"{name}.plan"
    try:
        return _mapped(path)
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
            return _mapped(path)
        finally:
            # Closing is not enough: a process forked meanwhile by another thread has the file open too.
            fcntl.flock(lock, fcntl.LOCK_UN)


def _remove_unused(folder: Path) -> None:
    """Remove plans that no living process holds."""
    for path in folder.glob("*.plan"):
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            path.unlink()
            fcntl.flock(file, fcntl.LOCK_UN)


def _own_folder() -> Path:
    """A folder of this user's in the node's temporary folder, that nobody else may write to."""
    folder = Path(tempfile.gettempdir()) / f"epoch-plans-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise OSError(f"{folder} is not this user's alone")
    return folder
