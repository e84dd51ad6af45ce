"""The run folder: resolved recipe, tokenizer, checkpoints, logs and versions, with one writer at a time."""

import json
import os
import re
import time
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from fnmatch import fnmatchcase
from io import BufferedReader
from pathlib import Path

import yaml

from data_module.corpus.manifest import TEXT_KEYS, changes
from data_module.errors import InputError, first_of
from data_module.system.files import (
    FORMAT_VERSION,
    FileLock,
    PlainValues,
    atomic_file,
    check_format,
    existing_parent,
    is_temporary_file,
    json_object,
    open_regular,
    pinned,
    read_json,
    read_whole,
    remove_temporary_files,
    write_error,
)
from data_module.system.text_files import LONGEST_LINE
from data_module.tokenization.tokenizer import TOKENIZER_NAME
from model.settings import DECAY_TO_LAST_STEP, changed_keys
from pipeline.config.recipe import Recipe, stored_settings
from pipeline.config.recipe_files import INVALID_SCALAR, MOST_BYTES, compose
from pipeline.config.settings import RunSettings
from pipeline.runtime.console import report
from pipeline.runtime.launch import JobStep, versions
from pipeline.runtime.signals import raise_if_stopped

EVENTS, METRICS, STARTS, SUMMARY = "tensorboard", "metrics.jsonl", "starts.jsonl", "summary.json"
"""TensorBoard's folder; the logged scalars, the starts of the run, and its final scores as JSON."""
EVENT_FILES = "events.out.tfevents."
"""Prefix of the names of TensorBoard's event files."""
AVERAGES = "average*.ckpt"
"""Pattern of the names of averaged checkpoints in a run folder."""
_OWN_AVERAGES = ("average-last-[0-9]*.ckpt", "average-best-[0-9]*.ckpt")
"""Those that `average` writes without `--output`."""
RUN_ID = "run_id"
"""The run's identity, which each of its checkpoints has too. Only the first start writes it, and `--fresh`."""
STOPPED_EARLY = "stopped-early.json"
"""Written when early stopping ends a run: the step and the patience."""

MAY_CHANGE = ("name", "decoding", "run", "monitoring", "trainer")
"""Sections of the recipe that may change when a run is resumed."""
MAY_CHANGE_KEYS = ("batches.max_tokens_per_device", "batches.workers", "corpus.folder")
"""Keys of other sections that may change."""
MAY_NOT_CHANGE = ("run.seed", "run.best_by", "run.validation_translations")
"""Keys of these sections that may not change."""

_MAX_ID_BYTES = 64
_STEP_NAME = re.compile(r"step=(\d+)\.ckpt")
_LOCK = ".lock"
_VERSIONS = "versions.json"
_OWN_FILES = ("config.yaml", TOKENIZER_NAME, _VERSIONS, STARTS, RUN_ID)
_CHECKPOINT_FILES = ("step=*.ckpt", "best.ckpt")
_REMOVED = {
    "checkpoints/around-best": _CHECKPOINT_FILES,
    "checkpoints": _CHECKPOINT_FILES,
    EVENTS: (f"{EVENT_FILES}*", "embeddings.*", "projector_config.pbtxt"),
    "": (STOPPED_EARLY, METRICS, SUMMARY, STARTS, *_OWN_AVERAGES, RUN_ID, ".fresh-*"),
}
"""What `--fresh` removes of a run: patterns of file names by folder, which may be a link to another disk."""


def step_path(run: Path, step: int) -> Path:
    """Return the path of the checkpoint after an optimizer step."""
    return run / "checkpoints" / f"step={step:08d}.ckpt"


def step_of(checkpoint: Path) -> int:
    """Return the optimizer step of a checkpoint, from its file name."""
    return int(checkpoint.stem.removeprefix("step="))


def step_checkpoints(run: Path, *, around_best: bool = False) -> list[Path]:
    """Return the newest checkpoints, or those that are kept around the best validation; by step, complete or not."""
    paths = (around_best_path if around_best else step_path)(run, 0).parent.glob("step=*.ckpt")
    return sorted(path for path in paths if _STEP_NAME.fullmatch(path.name))


def best_path(run: Path) -> Path:
    """Return the path of the checkpoint of the best validation."""
    return run / "checkpoints" / "best.ckpt"


def around_best_path(run: Path, step: int) -> Path:
    """Return the path of a checkpoint that is kept only because it is near the best validation."""
    return run / "checkpoints" / "around-best" / step_path(run, step).name


def nearest_steps(steps: Iterable[int], best: int, count: int) -> list[int]:
    """Return the `count` steps nearest to `best`, the earliest first; of two equally near steps, the later counts."""
    return sorted(sorted(steps, key=lambda step: (abs(step - best), -step))[:count])


def max_checkpoints(keep_last: int) -> int:
    """Return how many checkpoints a run has at most: the newest, as many around the best validation, and the best."""
    return 2 * keep_last + 1


def checkpoint_bytes(weight_bytes: int, with_average: bool) -> int:
    """Return the size of a checkpoint: weights, Adam's two moments and, with EMA, the average, all of one precision."""
    return (4 if with_average else 3) * weight_bytes


def is_valid(path: Path) -> bool:
    """Return whether the file is a complete archive; its directory is at the end, so little is read."""
    return path.is_file() and zipfile.is_zipfile(path)


def latest_valid(run: Path) -> tuple[Path | None, list[Path]]:
    """Return the newest complete checkpoint of a run, and the newer ones that are incomplete."""
    skipped: list[Path] = []
    for path in reversed(step_checkpoints(run)):
        if is_valid(path):
            return path, skipped
        skipped.append(path)
    return None, skipped


def all_checkpoints(run: Path) -> list[Path]:
    """Return the complete checkpoints in a run folder: the newest by step, then other ones of steps, best, averages."""
    steps = [*reversed(step_checkpoints(run)), *step_checkpoints(run, around_best=True)]
    return [path for path in (*steps, best_path(run), *sorted(run.glob(AVERAGES))) if is_valid(path)]


def stored_run_id(run: Path) -> str | None:
    """Return the identity in a run folder; None for a run of version 1.0 or 1.1, or if the file is damaged."""
    try:
        with open_regular(run / RUN_ID) as file:
            text = file.read(_MAX_ID_BYTES).decode(errors="replace")
    except (OSError, InputError):
        return None
    return text if re.fullmatch("[0-9a-f]{32}", text) else None


def read_metrics(run: Path, name: str = METRICS) -> Iterator[PlainValues]:
    """Yield the lines of a run's metrics.jsonl or another file of JSON lines; none if it does not exist.

    A line that a killed process has written only in part ends the iteration; such a line is removed on resume.
    """
    if not (run / name).exists():
        return
    with BufferedReader(open_regular(run / name)) as file:
        for line in iter(lambda: file.readline(LONGEST_LINE), b""):
            if (values := json_object(line)) is None:
                return
            yield values


def is_run(path: Path) -> bool:
    """Return whether the folder is a run folder: its config.yaml has the sections of a recipe."""
    return _config(path) is not None


def _config(path: Path) -> PlainValues | None:
    """Return the recipe in a folder's config.yaml; None if it lacks the sections of a recipe."""
    try:
        text = read_whole(path / "config.yaml", MOST_BYTES).decode()
        compose(text)
        config = yaml.safe_load(text)
    except (OSError, yaml.YAMLError, RecursionError, *INVALID_SCALAR):  # ValueError: also invalid UTF-8
        return None
    sections = ("corpus", "batches", "network", "training", "run")
    is_recipe = isinstance(config, dict) and all(isinstance(config.get(section), dict) for section in sections)
    return config if is_recipe else None


def best_by(path: Path) -> str:
    """Return the metric by which a run chooses its best validation."""
    config = _config(path) or {"run": {}}
    return str(config["run"].get("best_by", RunSettings.best_by))


def check_writable(path: Path, *, fresh: bool = False) -> None:
    """Raise InputError if the path is neither a run folder that can be written nor a place where one can be created.

    With `fresh`, also check that the existing run can be removed.
    """
    if path.exists() and not path.is_dir():
        raise InputError(f"{path}: is a file; give another run.folder")
    if error := write_error(existing_parent(path)):
        raise InputError(f"{path}: cannot be written ({error}); give another run.folder")
    lock = path / _LOCK
    if lock.exists() and not os.access(lock, os.W_OK, effective_ids=True):
        raise InputError(f"{lock}: cannot be written, so another user has the run; give another run.folder")
    if path.is_dir() and any(map(_is_foreign, path.iterdir())) and not is_run(path):
        raise InputError(f"{path}: is not empty and not a run folder; give another run.folder")
    for file in (lock, path / METRICS, *(path / EVENTS).glob(f"{EVENT_FILES}*")):
        if file.is_symlink():  # They are written in place; see `open_in_place`.
            raise InputError(f"{file}: is a link, which fit does not follow; remove it")
    checkpoints, around_best = best_path(path).parent, around_best_path(path, 0).parent
    for folder in (checkpoints, around_best, *([path / EVENTS] if fresh and (path / EVENTS).is_dir() else ())):
        if os.path.lexists(folder) and (error := _folder_error(folder)):
            link = f" (a link to {folder.readlink()})" if folder.is_symlink() else ""
            raise InputError(f"{folder}{link}: cannot be used ({error}); repair it, or give another run.folder")
    if not fresh:
        return
    for file in _files_to_remove(path):
        if error := pinned(file):
            raise InputError(f"{file}: cannot be removed ({error}); give another run.folder")
    for file in sorted(path.glob(AVERAGES)):
        if not any(fnmatchcase(file.name, name) for name in _OWN_AVERAGES):
            raise InputError(
                f"{file}: has a name that you gave it, so --fresh keeps it, and would be taken for an average of the"
                " new run; move it out of that folder"
            )


def _folder_error(folder: Path) -> str | None:
    """Return why a folder cannot be read or written, or None."""
    try:
        next(folder.iterdir(), None)
    except OSError as error:
        return error.strerror
    return write_error(folder)


def _files_to_remove(run: Path) -> Iterator[Path]:
    """Yield the files of a run that `--fresh` removes, including their temporary files that killed processes left."""
    for folder, patterns in _REMOVED.items():
        entries: list[Path] = []
        # The run has no such folder, or it is another user's, which `check_writable` refuses for `--fresh`.
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            entries = sorted((run / folder).iterdir())
        for entry in entries:
            is_ours = any(fnmatchcase(entry.name, name) or is_temporary_file(entry, name) for name in patterns)
            if is_ours and (_STEP_NAME.fullmatch(entry.name) or not entry.name.startswith("step=")):
                yield entry


def files_of_run(run: Path) -> Iterator[Path]:
    """Yield the files of a run that `fit` and `average` write, except for locks."""
    yield from _files_to_remove(run)
    yield from (run / name for name in _OWN_FILES)


def is_in_use(path: Path) -> bool:
    """Return whether a process is writing to the folder."""
    if not (path / _LOCK).exists():
        return False
    try:
        with FileLock(path / _LOCK) as lock:
            return not lock.take(shared=True)  # Shared, so that two processes that ask do not exclude each other.
    except PermissionError:
        return True
    except OSError:
        return False  # The file system has no locks, which `RunFolder` reports.


def in_use_error(path: Path) -> InputError:
    """Return the error for a folder that another process is writing to."""
    return InputError(f"{path}: another fit is writing to it; wait for it to end or give another run.folder")


class RunFolder:
    """A run folder that this process has locked; the operating system releases the lock of a killed process."""

    def __init__(self, path: Path, patience_seconds: float = 0.0) -> None:
        """Lock the folder, creating it if necessary; wait up to `patience_seconds` for another writer.

        Raises InputError when the folder is not a run folder, or when another process is writing to it.
        """
        self.path = path
        check_writable(path)
        self._made = [folder for folder in path.absolute().parents if not folder.exists()]
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(path / _LOCK)
        except OSError as error:
            raise InputError(f"{path}: cannot be written ({error.strerror}); give another run.folder") from error
        deadline = time.monotonic() + patience_seconds
        reported = False
        try:
            while not self._lock.take():
                if time.monotonic() >= deadline:
                    raise in_use_error(path)
                if not reported:
                    reported = True
                    report(f"{path}: another fit is writing to it; waiting {patience_seconds:.0f} s")
                raise_if_stopped("while another fit was writing")
                time.sleep(0.5)
        except BaseException as error:
            self._lock.close()
            if not isinstance(error, OSError):
                raise
            raise InputError(
                f"{path}: its file system cannot lock files ({error.strerror}); give a run.folder on another one"
            ) from None
        remove_temporary_files(path / "checkpoints", *_CHECKPOINT_FILES)
        remove_temporary_files(path, *_OWN_FILES)

    def close(self) -> None:
        """Release the lock; remove the folder if it holds nothing else, with the parents that were created for it."""
        with suppress(OSError):  # Another process may have removed one of them or begun to use it.
            if [entry.name for entry in self.path.iterdir()] == [_LOCK]:
                (self.path / _LOCK).unlink()
                for folder in (self.path, *self._made):
                    folder.rmdir()
        self._lock.close()

    def remove_run(self, job: JobStep | None) -> None:
        """Remove the run's files and nothing else; `write_config` replaces the recipe afterwards.

        A job leaves a marker, so that it resumes when SLURM requeues it.

        Raises InputError if a file cannot be removed.
        """
        for file in _files_to_remove(self.path):
            try:
                file.unlink()
            except OSError as error:
                raise InputError(
                    f"{file}: cannot be removed ({error.strerror}), so no new run has begun; remove it, then run the "
                    "same command again"
                ) from error
        for folder in filter(None, _REMOVED):
            with suppress(OSError):  # It is a link, holds other files, or does not exist.
                (self.path / folder).rmdir()
        if job is not None:
            _replace(reset_marker(self.path, job), b"")

    def write_config(self, recipe: Recipe, tokenizer: bytes, run_id: str) -> None:
        """Write the recipe, the tokenizer, the versions of format, code and packages, and a new run's identity."""
        _replace(self.path / "config.yaml", yaml.safe_dump(recipe.as_dict(), sort_keys=False).encode())
        _replace(self.path / TOKENIZER_NAME, tokenizer)
        written = {"format_version": FORMAT_VERSION, **versions()}
        _replace(self.path / _VERSIONS, json.dumps(written, indent=2).encode())
        if stored_run_id(self.path) != run_id:
            _replace(self.path / RUN_ID, run_id.encode())


def changes_of_run(path: Path, recipe: Recipe, texts_may_change: bool = False) -> tuple[list[str], list[str]]:
    """Return the differences of recipe and versions from those of the run: forbidden ones, then allowed ones.

    With `texts_may_change`, the training pairs are compared elsewhere, so that their files may have other names.

    Raises InputError when versions.json is damaged, or the run is of another format.
    """
    written = _config(path)
    if written is None:
        return [], []
    file, start_over = path / _VERSIONS, "start a new run with --fresh or another run.folder"
    recorded = read_json(file) if file.exists() else None
    if recorded is None:
        raise InputError(f"{file}: is missing or damaged; {start_over}")
    check_format(file, recorded.get("format_version", 1), start_over)  # Version 0.2 recorded no format.
    with suppress(ValueError):  # A recipe that this version cannot read is compared as it is.
        # Settings that are newer than the run get their defaults.
        written = stored_settings(written, Recipe, "", exact=True).as_dict()
    forbidden, allowed = _recipe_changes(written, recipe, texts_may_change)
    # Another version may resume the run, but may batch, initialize or round differently.
    own = {name: version for name, version in versions().items() if name != "host"}
    return forbidden, allowed + changes("", {name: recorded.get(name) for name in own}, own)


def stored_recipe(path: Path) -> Recipe | None:
    """Return the recipe of a run folder; None if it has none that this version can read."""
    config = _config(path)
    with suppress(ValueError):
        return stored_settings(config, Recipe, "")
    return None


def foreign_settings(own: Recipe, other: Recipe) -> list[str]:
    """Return how the recipe of a checkpoint differs from that of its run in keys that may not change."""
    return _recipe_changes(own.inherit_network(asdict(other.network)).as_dict(), other, texts_may_change=False)[0]


def _recipe_changes(written: PlainValues, recipe: Recipe, texts_may_change: bool) -> tuple[list[str], list[str]]:
    """Return the differences of a recipe from the one that a run has written: forbidden ones, then allowed ones."""
    new = recipe.inherit_network(written["network"]).as_dict()
    if not changed_keys(written["network"], new["network"]):
        written = {**written, "network": new["network"]}  # Other keys may give the same depths.
    # A weight counts for the pairs of its file, and the same pairs may be divided among other files.
    has_weights = any(text.get("weight", 1) != 1 for one in (written, new) for text in one["corpus"].get("train") or ())
    own_keys = (*MAY_CHANGE_KEYS, *(TEXT_KEYS if texts_may_change and not has_weights else ()))
    forbidden: list[str] = []
    allowed: list[str] = []
    for change in sorted(changes("", written, new)):
        key = change.split()[0].rstrip(":")
        may_change = key in own_keys or (key.split(".")[0] in MAY_CHANGE and key not in MAY_NOT_CHANGE)
        if key == "trainer.max_steps" and recipe.training.schedule in DECAY_TO_LAST_STEP:
            may_change, change = False, f"{change}, where training.schedule {recipe.training.schedule} ends"
        (allowed if may_change else forbidden).append(change)
    return forbidden, allowed


def check_same_run(path: Path, recipe: Recipe, texts_may_change: bool = False) -> list[str]:
    """Return the differences of recipe and versions from those of the run, all of which may change on resume.

    Raises InputError for other differences; see `changes_of_run` for `texts_may_change`.
    """
    forbidden, allowed = changes_of_run(path, recipe, texts_may_change)
    if not forbidden:
        return allowed
    raise InputError(
        f"{path}: contains a run of another recipe: {first_of(forbidden)}; change it back to resume that run (its"
        f" recipe is {path / 'config.yaml'}), or give another run.folder, or --fresh to remove that run"
    )


def reset_marker(path: Path, job: JobStep) -> Path:
    """Return the path of the marker that a job leaves when it has removed the previous run."""
    return path / f".fresh-{job.job}"


def should_reset(requested: bool, path: Path, job: JobStep | None) -> bool:
    """Return whether to remove the run in the folder.

    A job that was submitted with `--fresh` does so once: when SLURM requeues it, it resumes.
    """
    return requested and not (job is not None and reset_marker(path, job).exists())


def _is_foreign(entry: Path) -> bool:
    """Return whether an entry is something other than a file of a `fit` that was killed before it wrote its recipe."""
    ours = entry.name == ".lock" or entry.name.startswith((".starts-", ".fresh-", ".ranks-"))
    return not ours and not any(is_temporary_file(entry, name) for name in ("config.yaml", ".starts-*"))


def _replace(path: Path, contents: bytes) -> None:
    with atomic_file(path) as file:
        file.write(contents)


def settings_of_ranks(recipe: Recipe) -> dict[str, object]:
    """Return the settings that all ranks of a run have in common, by key; the run folder without links."""
    settings = {key: value for key, value in _flat(recipe.as_dict()).items() if key not in MAY_CHANGE_KEYS}
    return {**settings, "run.folder": str(recipe.run_folder().resolve())}


def _flat(values: object, prefix: str = "") -> dict[str, object]:
    if isinstance(values, dict) and values:
        return {k: v for name, value in values.items() for k, v in _flat(value, f"{prefix}{name}.").items()}
    return {prefix.rstrip("."): values}
