"""Epochs: the plan of each, and its view of the corpus if it has one, made once per node and memory-mapped by all.

Both are in a per-user folder of the node's temporary folder. The first process that needs one makes it; the others
wait, then map the same pages. A process holds a shared lock on what it uses, and the operating system releases the
locks of a killed process. Before a process makes a plan or a view, it removes all that are not locked, which bounds the
disk space used: that of two epochs.
"""

import errno
import fcntl
import hashlib
import logging
import mmap
import os
import shutil
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_module.batching import batch_plan
from data_module.batching.batch_plan import EpochPlan, plan_epoch
from data_module.corpus.store import ParallelCorpus, lengths_with_eos
from data_module.corpus.view import ViewMaker
from data_module.corpus.weights import epoch_pairs
from data_module.errors import InputError

log = logging.getLogger(__name__)

_VIEW, _PLAN = ".view", ".plan"
_PRIORITY = 10
"""Nice value of the thread that makes the next epoch, so that training goes first."""


class Epoch(NamedTuple):
    """What is trained on in one epoch."""

    corpus: ParallelCorpus
    plan: EpochPlan
    """Global batches of pairs of `corpus`."""
    lock: "FolderLock | None"
    """Keeps the corpus from being removed, if it is a view."""


class EpochCache:
    """Returns the epochs of a corpus, and makes the next one in the background."""

    def __init__(
        self,
        corpus: ParallelCorpus,
        *,
        batch_tokens: int,
        seed: int,
        views: ViewMaker | None = None,
        weights: tuple[Sequence[int], Sequence[float]] = ((), ()),
    ) -> None:
        """Prepare; nothing is made before the first epoch is asked for.

        Args:
            corpus: the training pairs.
            batch_tokens: maximum number of tokens per side of a global batch.
            seed: together with the epoch determines the order of pairs.
            views: make a view of each epoch; None for the same token ids in all epochs.
            weights: number of pairs and weight of each training source; all have the weight 1 if empty.
        """
        self._corpus = corpus
        self._settings = {"batch_tokens": batch_tokens, "seed": seed}
        self._views = views
        self._weights = weights
        self._next: _EpochThread | None = None

    def get(self, epoch: int) -> Epoch:
        """Return an epoch.

        Raises:
            ValueError: see `plan_epoch`.
            InputError: the view cannot be written.
        """
        if self._next is None or self._next.epoch != epoch:
            self._next = _EpochThread(self._open, epoch, priority=0)
        result = self._next.result()
        self._next = _EpochThread(self._open, epoch + 1, priority=_PRIORITY)
        return result

    def discard_next(self) -> None:
        """Wait for the background thread and discard its epoch. Call this before a fork, which copies no threads."""
        if self._next is not None:
            self._next.join()
        self._next = None

    def compute(self, epoch: int, corpus: ParallelCorpus | None = None) -> EpochPlan:
        """Return the plan of an epoch, of the corpus or a view of it, in this process's own memory."""
        # A view has the pairs of an epoch as often as they occur in it.
        pairs = epoch_pairs(*self._weights, self._settings["seed"], epoch) if self._views is None else None
        corpus = self._corpus if corpus is None else corpus
        source, target = lengths_with_eos(corpus.source), lengths_with_eos(corpus.target)
        return plan_epoch(source, target, **self._settings, epoch=epoch, pairs=pairs)

    def _open(self, epoch: int) -> Epoch:
        corpus, lock = (self._corpus, None) if self._views is None else self._open_view(self._views, epoch)
        # The plan depends on the code, numpy's version and the corpus.
        code = Path(batch_plan.__file__).read_bytes()
        settings = (sorted(self._settings.items()), self._weights)
        key = repr((corpus.identity, settings, epoch, np.__version__))
        name = hashlib.sha256(code + key.encode()).hexdigest()[:32]
        try:
            plan = shared_plan(_private_folder(), name, lambda: self.compute(epoch, corpus))
        except OSError as error:
            log.warning("this node's processes cannot share epoch plans (%s); each process computes its own", error)
            plan = self.compute(epoch, corpus)
        return Epoch(corpus, plan, lock)

    def _open_view(self, views: ViewMaker, epoch: int) -> tuple[ParallelCorpus, "FolderLock"]:
        name = hashlib.sha256(f"{views.identity} {epoch}".encode()).hexdigest()[:32]
        try:
            path, lock = shared_folder(_private_folder(), name, lambda folder: views.write(epoch, folder))
        except OSError as error:
            size = sum(side.tokens.nbytes + 10 * len(side) for side in (self._corpus.source, self._corpus.target))
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                reason = f"the disk is full, and the view of an epoch needs about {1.5 * size / 1e6:,.0f} MB"
            else:
                reason = f"the view of an epoch cannot be written: {error.strerror or error}"
            raise InputError(
                f"{tempfile.gettempdir()}: {reason}; make room, or set TMPDIR to a folder on another local disk, then"
                " run the same command again"
            ) from error
        return views.open(epoch, path), lock

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_next": None}


class _EpochThread(threading.Thread):
    """Makes one epoch. It is a daemon, so that a process can exit without waiting for it."""

    def __init__(self, make: Callable[[int], Epoch], epoch: int, priority: int) -> None:
        super().__init__(daemon=True)
        self.epoch = epoch
        self._make = make
        self._priority = priority
        self._epoch: Epoch | None = None
        self._error: Exception | None = None
        self.start()

    def run(self) -> None:
        if self._priority and sys.platform == "linux":
            # On Linux this is the priority of the thread, not of its process.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._priority)
        try:
            self._epoch = self._make(self.epoch)
        except Exception as error:
            self._error = error

    def result(self) -> Epoch:
        self.join()
        if self._epoch is None:
            raise self._error or RuntimeError("the thread returned no epoch")
        return self._epoch


class FolderLock:
    """A shared lock on a folder, held for as long as this object exists."""

    def __init__(self, folder: Path) -> None:
        """Raise FileNotFoundError if the folder has been removed."""
        self._descriptor: int | None = None
        self._descriptor = os.open(folder / "lock", os.O_RDONLY)
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)
        if not folder.exists():  # Removed while this process waited for the lock.
            raise FileNotFoundError(folder)

    def __del__(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)


def shared_folder(parent: Path, name: str, write: Callable[[Path], None]) -> tuple[Path, FolderLock]:
    """Return a folder of this name and a lock on it. If it does not exist, one of the calling processes writes it.

    Args:
        parent: where to create it.
        name: its name without the extension.
        write: writes to a temporary folder, which is then renamed.

    Raises:
        OSError: the folder cannot be written; nothing of it is left.
    """
    path = parent / f"{name}{_VIEW}"
    while True:
        try:
            return path, FolderLock(path)
        except FileNotFoundError:
            pass
        with (parent / "views.lock").open("a", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                if not path.exists():
                    _remove_unused(parent)
                    return path, _write_folder(path, write)
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)


def _write_folder(path: Path, write: Callable[[Path], None]) -> FolderLock:
    """Write a folder whole or not at all, and return a lock on it, without which another process might remove it."""
    partial = path.with_name("partial view")
    shutil.rmtree(partial, ignore_errors=True)  # of a killed process
    try:
        partial.mkdir()
        (partial / "lock").touch()
        lock = FolderLock(partial)
        write(partial)
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return lock


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
    path = folder / f"{name}{_PLAN}"
    try:
        return _map_plan(path)
    except FileNotFoundError:
        pass
    with (folder / "lock").open("a", encoding="utf-8") as lock:
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
    """Remove plans and views that no process has locked."""
    for path in [*folder.glob(f"*{_PLAN}"), *folder.glob(f"*{_VIEW}")]:
        is_view = path.suffix == _VIEW
        with suppress(FileNotFoundError), (path / "lock" if is_view else path).open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            if is_view:
                shutil.rmtree(path, ignore_errors=True)
            else:
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
