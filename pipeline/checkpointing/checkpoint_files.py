"""Names of a run's checkpoint files, and which of them are complete. Imports nothing that takes time."""

import re
import zipfile
from collections.abc import Iterable
from pathlib import Path

AVERAGES = "average*.ckpt"
"""Averaged checkpoints in a run folder, by a pattern."""
AVERAGE_RECORDS = "average-best-*.json"
"""What `average --best` chose, beside its averages."""
_STEP_NAME = re.compile(r"step=(\d+)\.ckpt")


def step_path(run: Path, step: int) -> Path:
    """Return the path of the checkpoint after an optimizer step."""
    return run / "checkpoints" / f"step={step:08d}.ckpt"


def step_of(checkpoint: Path) -> int:
    """Return the optimizer step of a checkpoint, from its file name."""
    return int(checkpoint.stem.removeprefix("step="))


def step_checkpoints(run: Path) -> list[Path]:
    """Return the run's checkpoints by step, the newest last, complete or not."""
    paths = (run / "checkpoints").glob("step=*.ckpt")
    return sorted(path for path in paths if _STEP_NAME.fullmatch(path.name))


def around_best_path(run: Path, step: int) -> Path:
    """Return the path of a checkpoint that is kept only because it is near the best validation."""
    return run / "checkpoints" / "around-best" / step_path(run, step).name


def around_best_checkpoints(run: Path) -> list[Path]:
    """Return the checkpoints near the best validation that are no longer among the newest, by step."""
    paths = around_best_path(run, 0).parent.glob("step=*.ckpt")
    return sorted(path for path in paths if _STEP_NAME.fullmatch(path.name))


def nearest_steps(steps: Iterable[int], best: int, count: int) -> list[int]:
    """Return the `count` steps nearest to `best`, the earliest first; of two equally near ones the later is nearer."""
    return sorted(sorted(steps, key=lambda step: (abs(step - best), -step))[:count])


def max_checkpoints(keep_last: int) -> int:
    """Return how many checkpoints a run has at most: the newest, as many around the best validation, and the best."""
    return 2 * keep_last + 1


def checkpoint_bytes(num_parameters: int, with_average: bool) -> int:
    """Return the size of a checkpoint: weights, Adam's two moments and, with EMA, the average, all in float32."""
    return 4 * (4 if with_average else 3) * num_parameters


def is_valid(path: Path) -> bool:
    """Return whether the file is a complete archive; its directory is at the end, so little is read."""
    return zipfile.is_zipfile(path)


def latest_valid(run: Path) -> tuple[Path | None, list[Path]]:
    """Return the newest complete checkpoint of a run, and the newer ones that are incomplete."""
    skipped: list[Path] = []
    for path in reversed(step_checkpoints(run)):
        if is_valid(path):
            return path, skipped
        skipped.append(path)
    return None, skipped
