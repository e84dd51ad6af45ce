"""From raw parallel text to a corpus folder, once: the same inputs and settings give the same bytes.

A corpus is written under a temporary name beside its own, and renamed when it is complete.
"""

import errno
import fcntl
import gc
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data_module.corpus.builder import learn_tokenizer, write_corpus
from data_module.corpus.manifest import differences, is_corpus, read_manifest
from data_module.corpus.store import MAX_TOKENS
from data_module.errors import InputError
from data_module.readers.dataset_sources import hub_revision
from data_module.readers.text_sources import count_pairs, files_of, fingerprint
from data_module.settings import CorpusSettings
from data_module.tokenization.tokenizer import Tokenizer

log = logging.getLogger(__name__)


def prepare(
    settings: CorpusSettings, tokenizer: Tokenizer | None = None, *, force: bool = False, progress: bool = True
) -> dict[str, Any]:
    """Make the corpus folder unless it is there and up to date, and return its manifest.

    A given `tokenizer` takes the place of one learned from the text, and of the settings' `vocabulary_size`.
    `force` makes it anew. Of two processes that prepare one folder the second waits, and finds it done.
    `progress` shows bars on standard error for what takes more than two seconds.

    Raises:
        InputError: the settings or a source file are at fault, the folder holds a corpus of other inputs or
            settings, is truncated, or is no corpus, or the disk is full. Nothing is left half-written.
    """
    _check_settings(settings)
    folder = Path(settings.folder)
    wanted = _wanted(settings)
    if not force and (manifest := _up_to_date(folder, wanted)) is not None:
        return manifest
    with _explained(folder):
        # Behind a link, the corpus is made beside what it leads to, and the link stays one.
        place = folder.resolve() if folder.is_symlink() else folder
        place.parent.mkdir(parents=True, exist_ok=True)
        with _locked(place):
            _tidy(place)
            # Another process may have made it while this one waited.
            manifest = _up_to_date(folder, wanted, ignore_differences=force)
            if manifest is None or force:
                # Every file is looked at before any time is spent.
                train_pairs = [count_pairs(text, settings) for text in settings.train]
                for text in (*settings.validation, *settings.test):
                    count_pairs(text, settings)
                with _replacing(place) as temporary, without_garbage_collection():
                    made_of = wanted | {"hub_revisions": _hub_revisions(settings)}
                    own = tokenizer or learn_tokenizer(settings, train_pairs, progress)
                    manifest = write_corpus(settings, own, made_of, train_pairs, temporary, progress)
    return manifest


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Spare a fifth of the time: millions of strings come and go, and no cycle is among them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def differs_from(manifest: dict[str, Any], settings: CorpusSettings) -> list[str]:
    """Return what differs between a corpus and the settings, a phrase for each; reads no source files."""
    return differences(manifest, {"settings": _settings_dict(settings)})


def _settings_dict(settings: CorpusSettings) -> dict[str, Any]:
    # A corpus may be moved: where it lies is no part of it. Nor is what is left empty.
    return {key: value for key, value in asdict(settings).items() if key != "folder" and value != []}


def _wanted(settings: CorpusSettings) -> dict[str, Any]:
    files = {name: path for text in settings.texts() for name, path in files_of(text).items()}
    return {
        "settings": _settings_dict(settings),
        "source_files": [fingerprint(name, path) for name, path in files.items()],
    }


def _hub_revisions(settings: CorpusSettings) -> dict[str, str]:
    """Where the text came from. Not compared: a commit that leaves the text as it is makes no other corpus."""
    revisions = {str(text.dataset): hub_revision(text) for text in settings.texts()}
    return {name: revision for name, revision in revisions.items() if revision}


def _check_settings(settings: CorpusSettings) -> None:
    ratio = settings.max_length_ratio
    for key, ok, rule in (
        ("train", bool(settings.train), "name at least one text source"),
        ("validation", bool(settings.validation), "name at least one text source"),
        ("vocabulary_size", settings.vocabulary_size > 0, "must be positive"),
        ("tokenizer_sentences", settings.tokenizer_sentences >= 2, "must be 2 or more"),
        ("character_coverage", 0.98 <= settings.character_coverage <= 1, "must be from 0.98 to 1"),
        ("max_tokens", 1 <= settings.max_tokens <= MAX_TOKENS, f"must be from 1 to {MAX_TOKENS}"),
        ("max_length_ratio", ratio is None or ratio >= 1, "must be 1 or more, or null"),
    ):
        if not ok:
            raise InputError(f"corpus.{key}: {rule}; it is {getattr(settings, key)}")


def _up_to_date(folder: Path, wanted: dict[str, Any], *, ignore_differences: bool = False) -> dict[str, Any] | None:
    """Return the manifest of the corpus that is there; None when none is, or `ignore_differences`.

    Raises:
        InputError: the folder is no corpus, or a truncated one, or one made of something else.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    if not is_corpus(folder):
        raise InputError(f"{folder}: exists and is not a corpus; name another corpus.folder, or move it away")
    if ignore_differences:
        return None
    manifest = read_manifest(folder)
    if found := differences(manifest, wanted):
        raise InputError(
            f"{folder}: was made from other inputs or settings: {'; '.join(found)};"
            " name another corpus.folder, or rebuild this one with `prepare --force`"
        )
    log.info("%s is up to date", folder)
    return manifest


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder that may not be there; the system frees it when its owner dies."""
    with folder.with_name(f".{folder.name}.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("%s is being prepared by another process; waiting for it", folder)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _partial(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.partial")


def _replaced(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.replaced")


def _tidy(folder: Path) -> None:
    """Remove what an interrupted or killed process left behind; call it with the lock held."""
    if _replaced(folder).exists() and not folder.exists():
        _replaced(folder).rename(folder)
    for leftover in (_partial(folder), _replaced(folder)):
        shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """Give an empty folder that takes the place of `folder` at the end, or goes away on an error."""
    temporary = _partial(folder)
    try:
        temporary.mkdir()
        yield temporary
        for path in (*temporary.iterdir(), temporary):
            _sync(path)
        if folder.exists():
            folder.rename(_replaced(folder))
        temporary.rename(folder)
        _sync(folder.parent)
    finally:
        _tidy(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Turn what can go wrong with writing into one line that names the folder."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise InputError(
                f"{folder}: the disk is full, nothing was kept; free space, or name another corpus.folder"
            ) from error
        raise InputError(
            f"{folder}: cannot be written: {error.strerror} ({error.filename}); name another corpus.folder"
        ) from error
