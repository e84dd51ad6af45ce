"""The run folder: recipe as resolved, tokenizer, checkpoints, TensorBoard, versions. One writer at a time."""

import fcntl
import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import yaml

from data_module.errors import InputError
from pipeline.config.recipe import Recipe, load_recipe
from pipeline.runtime.atomic_file import atomic_file, is_temporary_file, remove_temporary_files
from pipeline.runtime.signals import Stopped, raise_if_stopped
from pipeline.runtime.slurm import JobStep
from pipeline.runtime.versions import versions

EVENTS = "tensorboard"

METRICS = "metrics.jsonl"

STARTS = "starts.jsonl"

SUMMARY = "summary.json"

MAY_CHANGE = ("name", "decoding", "run", "monitoring", "trainer")
"""Sections that another config may change on resume; the others would make it another run."""
MAY_CHANGE_KEYS = ("batches.max_tokens_per_device", "batches.workers", "corpus.folder")

MAX_STARTS = 3
"""How often a job starts from one and the same checkpoint: the first time, and twice after a failure."""

_OWN_FILES = ("config.yaml", "tokenizer.model", "versions.json")
STOPPED_EARLY = "stopped-early.json"
"""Left by a run that patience has ended: the step, and the patience it had."""


def is_run(path: Path) -> bool:
    """Whether the folder is a run of this program: its recipe says so, and not any config.yaml."""
    try:
        config = yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return False
    return isinstance(config, dict) and {"corpus", "batches", "network", "training", "run"} <= config.keys()


class RunFolder:
    """A folder that one process owns while it writes; the operating system lets go of a killed owner's lock."""

    def __init__(self, path: Path, patience_seconds: float = 0.0) -> None:
        """Takes the folder, making it if need be; waits so long for another writer to end.

        Raises InputError when it holds something else, or when another process writes there.
        """
        self.path = path
        if path.exists() and not path.is_dir():
            raise InputError(f"{path}: is a file; give another run.folder")
        if path.is_dir() and any(map(_is_foreign, path.iterdir())) and not is_run(path):
            raise InputError(f"{path}: holds something else than a run; give another run.folder")
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock: IO[str] = (path / ".lock").open("a")
        except OSError as error:
            raise InputError(f"{path}: cannot be written ({error.strerror}); give another run.folder") from error
        deadline = time.monotonic() + patience_seconds
        said = False
        try:
            while not self._take():
                if time.monotonic() >= deadline:
                    raise InputError(
                        f"{path}: another fit is writing there; wait for it to end or give another run.folder"
                    )
                if not said:
                    said = True
                    print(f"{path}: another fit is writing there; waiting {patience_seconds:.0f} s", file=sys.stderr)
                raise_if_stopped("while another fit was writing")
                time.sleep(0.5)
        except BaseException as error:
            self._lock.close()
            if not isinstance(error, OSError):
                raise
            raise InputError(
                f"{path}: its file system cannot lock files ({error.strerror}); give a run.folder on another one"
            ) from None
        remove_temporary_files(path / "checkpoints", "")
        for name in _OWN_FILES:
            remove_temporary_files(path, name)

    def _take(self) -> bool:
        try:
            # A POSIX lock: it dies with this process, while flock's would live on in a loader's worker.
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def close(self) -> None:
        """Let go of the folder."""
        self._lock.close()

    def remove_run(self, step: JobStep | None) -> None:
        """Remove the run that is here, and nothing else; `write_config` replaces what makes the folder a run's.

        A job notes that it has: when it comes back from the queue, it is to go on.
        """
        for name in ("checkpoints", "tensorboard"):
            shutil.rmtree(self.path / name, ignore_errors=True)
        for name in (STOPPED_EARLY, METRICS, SUMMARY, STARTS):
            (self.path / name).unlink(missing_ok=True)
        for average in self.path.glob("average-last-*.ckpt"):
            average.unlink()
        for note in self.path.glob(".fresh-*"):
            note.unlink()
        if step is not None:
            reset_marker(self.path, step).touch()

    def write_config(self, recipe: Recipe, tokenizer: bytes) -> None:
        """Recipe, tokenizer, and the versions of everything that had a part in it."""
        _replace(self.path / "config.yaml", yaml.safe_dump(recipe.as_dict(), sort_keys=False).encode())
        _replace(self.path / "tokenizer.model", tokenizer)
        _replace(self.path / "versions.json", json.dumps(versions(), indent=2).encode())


def differences(path: Path, recipe: Recipe) -> tuple[list[str], list[str]]:
    """What a run's recipe and versions and these differ in: what may not change, and what may."""
    config = path / "config.yaml"
    if not is_run(path):
        return [], []
    written = yaml.safe_load(config.read_text())
    with suppress(InputError):  # what is no recipe of this version differs, and is named as it stands
        # A setting that is newer than the run has its default there.
        written = load_recipe([config]).as_dict()
    had, wanted = _flat(written), _flat(recipe.as_dict())
    forbidden: list[str] = []
    allowed: list[str] = []
    for key in sorted(had.keys() | wanted.keys()):
        if had.get(key) != wanted.get(key):
            may = key in MAY_CHANGE_KEYS or (key.split(".")[0] in MAY_CHANGE and key != "run.seed")
            (allowed if may else forbidden).append(f"{key} {had.get(key)} -> {wanted.get(key)}")
    # Another version goes on as well, but may batch, draw or round otherwise.
    noted = path / "versions.json"
    before = json.loads(noted.read_text()) if noted.exists() else {}
    now = {name: what for name, what in versions().items() if name != "host"}
    allowed += [f"{name} {before.get(name)} -> {what}" for name, what in now.items() if before.get(name) != what]
    return forbidden, allowed


def different_run_message(path: Path, forbidden: list[str]) -> str:
    """What to say of differences that make the recipe's another run than the folder's."""
    way_out = "use --fresh to start over, or another run.folder"
    return f"{path}: holds a run of another recipe: {'; '.join(forbidden)}; {way_out}"


def reset_marker(path: Path, step: JobStep) -> Path:
    """What is there once a job has removed the run that it had found."""
    return path / f".fresh-{step.job}"


@contextmanager
def count_start(path: Path, step: JobStep, checkpoint: Path | None) -> Iterator[None]:
    """Count a job's starts from one checkpoint that came to no end of their own.

    Whoever stops, finishes or ends by a mistake removes the note; a crash, a hang or a lost node leaves it.

    Raises InputError when there were MAX_STARTS already: what repeats is no accident.
    """
    name = checkpoint.name if checkpoint else "the beginning"
    note = path / f".starts-{step.job}.json"
    noted = json.loads(note.read_text()) if note.exists() and step.restarts else {}
    starts = 1 + (noted["starts"] if noted.get("checkpoint") == name else 0)
    if starts > MAX_STARTS:
        raise InputError(
            f"{path}: the job has failed {MAX_STARTS} times from {name}; see the errors in its log, "
            "then submit it again"
        )
    _replace(note, json.dumps({"checkpoint": name, "starts": starts}).encode())
    try:
        yield
    except (Stopped, InputError):
        note.unlink(missing_ok=True)
        raise
    note.unlink(missing_ok=True)


def _is_foreign(entry: Path) -> bool:
    """Whether an entry is none that a fit leaves which was killed before it had written its recipe."""
    ours = entry.name == ".lock" or entry.name.startswith((".starts-", ".fresh-"))
    return not ours and not any(is_temporary_file(entry, name) for name in ("config.yaml", ".starts-"))


def _replace(path: Path, contents: bytes) -> None:
    with atomic_file(path) as file:
        file.write(contents)


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(values, dict) and values:
        return {k: v for name, value in values.items() for k, v in _flat(value, f"{prefix}{name}.").items()}
    return {prefix.rstrip("."): values}
