"""Names of a run's checkpoint files, and which of them are complete. Imports nothing that takes time."""

import re
import zipfile
from pathlib import Path

AVERAGES = "average*.ckpt"
"""Averaged checkpoints in a run folder, by a pattern."""
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
