"""Messages on standard error, and which warnings of libraries are not shown."""

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tqdm import tqdm

from pipeline.runtime.launch import process_rank

_LIGHTNING_LOGGERS = (
    # Lightning sets the level of its two packages itself when it is imported.
    "lightning.pytorch",
    "lightning.fabric",
    "lightning.pytorch.utilities.rank_zero",
    "lightning.fabric.utilities.distributed",
)


def quiet_lightning() -> None:
    """Hide Lightning's start-up messages, and warnings that do not apply to this program."""
    for name in _LIGHTNING_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*This DataLoader will create .* worker processes.*")
    warnings.filterwarnings("ignore", ".*treespec, LeafSpec.*")
    warnings.filterwarnings("ignore", ".*overridden `transfer_batch_to_device`.*")  # It is overridden on purpose.
    warnings.filterwarnings("ignore", ".*`srun` command is available.*")
    # Scores are summed over ranks before they are logged.
    warnings.filterwarnings("ignore", ".*recommended to use .*sync_dist=True.*")


@contextmanager
def lightning_noise_restored() -> Iterator[None]:
    """Undo `quiet_lightning` at the end, for a process that is not this program's alone."""
    levels = {name: logging.getLogger(name).level for name in _LIGHTNING_LOGGERS}
    try:
        with warnings.catch_warnings():
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def say(message: str) -> None:
    """Print one line on standard error, above a progress bar if there is one; on rank 0 only."""
    if process_rank() > 0:
        return
    # Standard error may be a file on a full disk; training must not end because of that.
    with suppress(OSError):
        print_above_bars(message)


def print_above_bars(message: str) -> None:
    """Print one line on standard error, in a terminal above the progress bars."""
    if sys.stderr.isatty():
        tqdm.write(message, file=sys.stderr)
    else:  # tqdm would print every bar anew, also one that has not begun.
        print(message, file=sys.stderr, flush=True)
