"""Epochs: which variant of the corpus each trains on, and its plan, made once a node and memory-mapped by all.

Plans are in a per-user folder of the node's temporary folder. The first process that needs one writes it whole; the
others wait, then map the same pages. Who has mapped a plan keeps it, whether its file is still there or not.
"""

import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_module.batching import batch_plan
from data_module.batching.batch_plan import EpochPlan, plan_epoch
from data_module.corpus import weights as weights_module
from data_module.corpus.store import ParallelCorpus, lengths_with_eos
from data_module.corpus.weights import epoch_pairs
from data_module.files import FileLock, atomic_file, remove_temporary_files

log = logging.getLogger(__name__)

KEPT_PLANS = 4
"""How many plans a user's folder keeps, the newest. A process that needs a removed one makes it again."""


class Epoch(NamedTuple):
    """What is trained on in one epoch."""

    corpus: ParallelCorpus
    plan: EpochPlan
    """Global batches of pairs of `corpus`."""


class Epochs:
    """Returns the epochs of a corpus."""

    def __init__(
        self,
        variants: Sequence[ParallelCorpus],
        *,
        batch_tokens: int,
        seed: int,
        weights: tuple[Sequence[int], Sequence[float]] = ((), ()),
    ) -> None:
        """Prepare; nothing is made before the first epoch is asked for.

        Args:
            variants: the training pairs, in the encodings that epochs take in turn.
            batch_tokens: maximum number of tokens per side of a global batch.
            seed: together with the epoch determines the order of pairs.
            weights: number of pairs and weight of each training source; all have the weight 1 if empty.
        """
        self._variants = variants
        self._settings = {"batch_tokens": batch_tokens, "seed": seed}
        self._weights = weights

    def corpus(self, epoch: int) -> ParallelCorpus:
        """Return the variant of the corpus that an epoch trains on."""
        return self._variants[epoch % len(self._variants)]

    def get(self, epoch: int) -> Epoch:
        """Return an epoch.

        Raises:
            ValueError: see `plan_epoch`.
        """
        # The plan depends on the code, numpy's version and the corpus.
        code = b"".join(Path(str(module.__file__)).read_bytes() for module in (batch_plan, weights_module))
        settings = (sorted(self._settings.items()), self._weights)
        key = repr((self.corpus(epoch).identity, settings, epoch, np.__version__))
        name = hashlib.sha256(code + key.encode()).hexdigest()[:32]
        try:
            plan = shared_plan(_private_folder(), name, lambda: self.compute(epoch))
        except OSError as error:
            log.warning("this node's processes cannot share epoch plans (%s); each process computes its own", error)
            plan = self.compute(epoch)
        return Epoch(self.corpus(epoch), plan)

    def compute(self, epoch: int) -> EpochPlan:
        """Return the plan of an epoch in this process's own memory."""
        corpus = self.corpus(epoch)
        pairs = epoch_pairs(*self._weights, self._settings["seed"], epoch)
        source, target = lengths_with_eos(corpus.source), lengths_with_eos(corpus.target)
        return plan_epoch(source, target, **self._settings, epoch=epoch, pairs=pairs)


def shared_plan(folder: Path, name: str, make: Callable[[], EpochPlan]) -> EpochPlan:
    """Map the plan of this name in the folder. If it does not exist, one of the calling processes computes it.

    Raises:
        OSError: the folder cannot be written.
    """
    path = folder / f"{name}.plan"
    with suppress(FileNotFoundError):
        return _map_plan(path)
    with FileLock(folder / "lock") as lock:
        lock.take(wait=True)
        if not path.exists():
            remove_temporary_files(folder, "")
            by_age = sorted(folder.glob("*.plan"), key=lambda plan: plan.stat().st_mtime_ns, reverse=True)
            for unused in by_age[KEPT_PLANS - 1 :]:
                unused.unlink()
            with atomic_file(path) as file:
                file.write(make().numbers.data)
        return _map_plan(path)


def _map_plan(path: Path) -> EpochPlan:
    # A plain array of the same memory, because indexing np.memmap is several times slower.
    return EpochPlan(np.asarray(np.memmap(path, dtype=np.uint32, mode="r")))


def _private_folder() -> Path:
    """Return this user's folder in the node's temporary folder, which no other user may write to."""
    folder = Path(tempfile.gettempdir()) / f"epoch-plans-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise OSError(f"{folder} is not private to this user")
    return folder
