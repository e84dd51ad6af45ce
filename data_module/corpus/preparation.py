"""Prepare a corpus folder from raw parallel text. The same inputs and settings give the same bytes.

A corpus is written to a temporary folder beside its own and renamed when it is complete.
"""

import gc
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import MISSING, asdict, fields
from pathlib import Path

from data_module.corpus.builder import learn_tokenizer, write_corpus
from data_module.corpus.checks import (
    check_folder,
    check_settings,
    check_text,
    given_tokenizer,
    size_warnings,
    source_warnings,
    tokenizer_file,
)
from data_module.corpus.manifest import (
    CORPUS_NAMES,
    MANIFEST_NAME,
    Inputs,
    Manifest,
    Origin,
    differences,
    is_corpus,
    read_manifest,
)
from data_module.corpus.pairs import all_available, fingerprint, open_reader
from data_module.errors import InputError
from data_module.settings import CorpusSettings
from data_module.system.files import FileLock, PlainValues, disk_full_error, locked_to_replace, replaced_folder
from data_module.system.outputs import check_outputs, files_of_texts, require_own
from data_module.tokenization.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_DEFAULTS = {field.name: field.default for field in fields(CorpusSettings) if field.default is not MISSING}
"""Settings that a manifest lacks are newer than its corpus, which was made as if they had their defaults."""


def prepare(
    settings: CorpusSettings, tokenizer: Tokenizer | None = None, *, force: bool = False, progress: bool = True
) -> Manifest:
    """Create the corpus folder unless it exists and is up to date; return its manifest.

    If two processes prepare the same folder, the second waits for the first and uses its corpus.

    Args:
        settings: the recipe's `corpus:` section.
        tokenizer: the tokenizer of a run to start from. It replaces a tokenizer trained on the text, and the settings'
            `vocabulary_size`.
        force: rebuild the corpus even if it is up to date or was made from other inputs.
        progress: show progress bars on standard error for stages of more than two seconds.

    Raises InputError if the settings or a source are invalid; the folder is no corpus, or one that is truncated, of
    another format, or of other inputs or settings; the disk is full; or a run trains on the corpus that would be
    replaced. No partial corpus is left behind.
    """
    check_settings(settings)
    given_tokenizer(settings, tokenizer)
    check_outputs([], files_of_texts(asdict(settings)))  # Standard output may go to one of them.
    folder = Path(settings.folder)
    if is_corpus(folder) and force:
        with _replaceable(settings):
            pass  # Checked again before the corpus is replaced, because runs may begin meanwhile.
    elif is_corpus(folder):
        read_manifest(folder)  # A truncated corpus, or one of another format, is refused before the texts are read.
    wanted = _wanted(settings)
    if not force and (manifest := _up_to_date(settings, wanted)) is not None:
        log.info("%s is up to date", folder)
        return manifest
    check_folder(settings)
    with _write_errors(folder):
        # If the folder is a link, replace the folder that it points to and keep the link.
        target = folder.resolve() if folder.is_symlink() else folder
        with locked_to_replace(target):
            # Another process may have made the corpus while this one waited for the lock.
            manifest = _up_to_date(settings, wanted, ignore_differences=force)
            if manifest is None or force:
                manifest = _make(settings, tokenizer, wanted, target, progress)
    return manifest


def _make(
    settings: CorpusSettings, earlier: Tokenizer | None, wanted: Inputs, folder: Path, progress: bool
) -> Manifest:
    """Make the corpus, put it in the place of `folder`, and return its manifest; `prepare` describes the arguments."""
    # Check every source before doing any expensive work.
    checked = check_text(settings)
    for warning in source_warnings(settings, checked):
        log.warning(warning)
    with ExitStack() as until_replaced, replaced_folder(folder) as temporary, without_garbage_collection():
        revisions: dict[str, str] = {}
        for text in settings.texts():
            revisions |= open_reader(text, settings).hub_revisions()
        tokenizer = given_tokenizer(settings, earlier) or learn_tokenizer(settings, checked, progress)
        for warning in [] if earlier else size_warnings(settings, checked):
            log.warning(warning)
        inputs: Origin = {**wanted, "hub_revisions": revisions}
        manifest = write_corpus(settings, tokenizer, inputs, checked, temporary, progress)
        until_replaced.enter_context(_replaceable(settings))
    return manifest


@contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """Keep `prepare --force` from replacing a corpus, by a shared lock on its manifest, which ends with the process."""
    with ExitStack() as lock:
        with suppress(OSError):  # A corpus can be trained on where its file system has no locks.
            lock.enter_context(FileLock(folder / MANIFEST_NAME, os.O_RDONLY)).take(shared=True, wait=True)
        yield


@contextmanager
def _replaceable(settings: CorpusSettings) -> Iterator[None]:
    """Keep runs from starting to train on a corpus.

    Raises InputError if a run already trains on it, or its folder holds anything else, or a text of the recipe.
    """
    folder = Path(settings.folder)
    check_outputs([("corpus.folder", folder)], files_of_texts({**asdict(settings), "tokenizer": None}))
    require_own(folder, CORPUS_NAMES, "name another corpus.folder")
    with ExitStack() as stack:
        with suppress(OSError):  # There is no corpus, or its file system has no locks.
            lock = stack.enter_context(FileLock(folder / MANIFEST_NAME, os.O_RDWR))
            if not lock.take():
                raise InputError(f"{folder}: a run is training on it; wait for its end, or name another corpus.folder")
        yield


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection. It takes a fifth of the time, and no object is part of a reference cycle."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def existing_corpus(settings: CorpusSettings, *, compare_texts: bool) -> Manifest | None:
    """Return the manifest of the corpus that is in the folder, after comparing it; None if the folder holds nothing.

    With `compare_texts`, all texts are read, if they are available here, to check that the corpus was made from them.

    Raises InputError if the folder is no corpus, or the corpus is truncated or was made from other inputs or settings.
    """
    reads = compare_texts and is_corpus(Path(settings.folder)) and all_available(settings)
    if (given := tokenizer_file(settings)) is not None:
        reads = reads and given.exists()
    return _up_to_date(settings, _wanted(settings) if reads else {"settings": _settings_dict(settings)})


def _settings_dict(settings: CorpusSettings) -> PlainValues:
    # The folder is left out because a corpus may be moved, and weights because only epochs depend on them.
    values = {key: value for key, value in asdict(settings).items() if key != "folder"}
    for text in (text for split in ("train", "validation", "test") for text in values[split]):
        del text["weight"]
    return values


def _wanted(settings: CorpusSettings) -> Inputs:
    files = {name: path for text in settings.texts() for name, path in open_reader(text, settings).files().items()}
    if (given := tokenizer_file(settings)) is not None:
        files[str(given)] = given
    return {
        "settings": _settings_dict(settings),
        "source_files": [fingerprint(name, path) for name, path in files.items()],
    }


def _up_to_date(
    settings: CorpusSettings, wanted: Mapping[str, object], *, ignore_differences: bool = False
) -> Manifest | None:
    """Return the manifest of the existing corpus; None if there is none, or if `ignore_differences`.

    Raises InputError if the folder is no corpus, or the corpus is truncated or was made from other inputs.
    """
    folder = Path(settings.folder)
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    if not is_corpus(folder):
        raise InputError(f"{folder}: exists and is not a corpus; name another corpus.folder, or move it away")
    if ignore_differences:
        return None
    manifest = read_manifest(folder)
    if changes := differences({**manifest, "settings": _DEFAULTS | manifest["settings"]}, wanted):
        raise InputError(
            f"{folder}: was made from other inputs or settings: {'; '.join(changes)};"
            " name another corpus.folder, or rebuild this one for a new run with `prepare --force`"
        )
    return manifest


@contextmanager
def _write_errors(folder: Path) -> Iterator[None]:
    """Convert write errors to an `InputError` that names the folder."""
    try:
        yield
    except OSError as error:
        if disk_full_error(error):
            raise InputError(
                f"{folder}: the disk is full, nothing was kept; free space, or name another corpus.folder"
            ) from error
        where = f" ({error.filename})" if error.filename else ""
        raise InputError(
            f"{folder}: cannot be written: {error.strerror or error}{where}; name another corpus.folder"
        ) from error
