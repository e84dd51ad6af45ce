"""The reader of Hugging Face data sets: by name from the hub, or a local folder of parquet or JSON files.

Only data files are read. Code that comes with a data set is never run.
"""

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from data_module.corpus.readers import Reader, as_lines
from data_module.errors import InputError, install, require_package

_CHUNK_ROWS = 10_000
_SHARD = re.compile(r"-\d{5}-of-(\d{5})\.")

log = logging.getLogger(__name__)


class HubDataset(Reader):
    """One split of a data set with a `translation` column: `dataset`, `subset` and `split` of a text source."""

    @property
    def names(self) -> tuple[str, str]:
        """The split, whose rows line numbers refer to: `wmt/wmt14:de-en:train`."""
        name = ":".join(part for part in (self.text.dataset, self.text.subset, self.text.split) if part)
        return name, name

    def files(self) -> dict[str, Path]:
        """Return the split's data files by their names in the data set. Those on the hub are downloaded once.

        Raises InputError if the `datasets` library is missing, there is no such data set, subset or split, or the hub
        cannot be reached.
        """
        return self._open()[1]

    def is_available(self) -> bool:
        """Return whether the data set is a local folder."""
        return Path(str(self.text.dataset)).exists()

    def check(self) -> Iterator[tuple[bool, str]]:
        """Check that the `datasets` library is installed, and that a path leads to a folder."""
        if Path(str(self.text.dataset)).is_file():
            yield False, f"data set {self.text.dataset}: a file, not a data set; name the folder that it is in"
            return
        ok = find_spec("datasets") is not None
        place = "is local" if self.is_available() else "comes from the Hugging Face hub: prepare needs a network"
        yield ok, f"data set {self.text.dataset} {place}" + ("" if ok else f"; it needs: {install('datasets')}")

    def hub_revisions(self) -> dict[str, str]:
        """Return the commit of a data set on the hub; nothing for a local folder."""
        return {} if self.is_available() else {str(self.text.dataset): str(self._open()[0].hash)}

    def chunks(self) -> Iterator[tuple[list[bytes], list[bytes]]]:
        r"""Yield the split's rows. A null is an empty sentence, and a "\n" in a sentence becomes a space.

        Raises InputError as `files` does, or if a file is damaged, or has no such column or languages.
        """
        source, target = self.languages
        if source == target:
            raise InputError(
                f"{self.names[0]}: source_language and target_language (its own, or else those of corpus) are both "
                f"{source!r}; name its two languages"
            )
        builder, files = self._open()
        compute = require_package("pyarrow.compute", "datasets")
        for name, path in files.items():
            # Files are read separately so that an error can name the file.
            with _library_errors(
                f"{name}: is damaged, or lacks a `translation` column with text in {source!r} and {target!r}",
                "correct source_language or target_language, name a data set of translations, or fetch the file again",
            ):
                for table in _tables(builder, str(self.text.split), path):
                    columns = [compute.struct_field(table["translation"], language) for language in (source, target)]
                    # As bytes, because a file may hold invalid UTF-8.
                    sides = [as_lines(column.cast("large_binary").to_pylist()) for column in columns]
                    yield sides[0], sides[1]

    def _open(self) -> tuple[Any, dict[str, Path]]:
        name, subset, split = str(self.text.dataset), self.text.subset, str(self.text.split)
        if self.is_available():
            with _library_errors(
                f"{name}: cannot be read as a data set", "name a folder of parquet or JSON files, and a `subset` of it"
            ):
                return _open(name, subset, split)
        with _library_errors(
            f"{name}: no such folder, and it cannot be fetched from the Hugging Face hub",
            "correct the name and its `subset` (a private or gated data set needs `hf auth login`); without a network,"
            f" run `hf download {name} --repo-type dataset --local-dir FOLDER` on a machine with one, and name FOLDER",
        ):
            return _open_once(name, subset, split)


def _tables(builder: Any, split: str, path: Path) -> Any:
    """Return an iterator over a file's rows, as Arrow tables or record batches."""
    if builder.name == "json":
        builder.config.data_files = {split: [str(path)]}
        builder.info.features = None  # Take the columns from the file, not from README.md.
        return builder.as_streaming_dataset(split).with_format("arrow").iter(_CHUNK_ROWS)
    # The `datasets` library is not used here: after an error its threads can abort the process at exit.
    return require_package("pyarrow.parquet", "datasets").ParquetFile(path).iter_batches(_CHUNK_ROWS, use_threads=False)


def _open(name: str, subset: str | None, split: str) -> tuple[Any, dict[str, Path]]:
    """Return the library's builder of a split, and the split's files by name.

    Raises InputError as `HubDataset.files` does, and whatever the library raises.
    """
    datasets, is_local = _library(), Path(name).exists()
    # An absolute path, because the library takes some names, such as "json", for formats.
    path = str(Path(name).resolve()) if is_local else name
    if is_local:
        if not Path(name).is_dir():
            raise InputError(f"{name}: a file, not a data set; name the folder that it is in")
    else:
        log.info("fetching %s from the Hugging Face hub, except its files in the cache", name)
    builder = _builder(datasets, path, subset)
    if builder.name not in ("parquet", "json"):  # No other format holds translations, and some could run code.
        raise InputError(f"{name}: its files are read as {builder.name}; name a data set of parquet or JSON files")
    splits = {str(key): list(files) for key, files in builder.config.data_files.items()}
    if split not in splits:
        raise InputError(f"{name}: there is no split {split!r}; give `split`, one of: {', '.join(splits)}")
    files = splits[split]
    shards = max((int(count) for file in files for count in _SHARD.findall(file)), default=0)
    if len(files) < shards:
        raise InputError(f"{name}: only {len(files)} of the {shards} files of {split!r} exist; fetch the others")
    for file in files:  # Links in a folder may lead elsewhere.
        inner = file.removeprefix(f"{builder.base_path}/")
        whole = Path(os.path.normpath(Path(builder.base_path, inner)))
        if "://" in inner or not whole.is_relative_to(builder.base_path):
            raise InputError(f"{name}: its card names {file}, outside the folder; put the file into the folder")
    names = [f"{name}/{file.removeprefix(builder.base_path + '/')}" for file in files]
    paths = files if is_local else datasets.DownloadManager().download(files)
    return builder, dict(zip(names, map(Path, paths), strict=True))


_open_once = cache(_open)
"""For data sets on the hub, so that every pass reads the same revision."""


def _library() -> ModuleType:
    """Return the `datasets` library without its progress bars and logs: errors that it logs are raised as well."""
    library = require_package("datasets", "datasets")
    if int(library.__version__.split(".")[0]) < 4:
        # Earlier versions run code that comes with a data set.
        raise InputError(f"datasets {library.__version__} is too old; run: {install('datasets')}")
    library.disable_progress_bars()
    for name in ("datasets", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return library


def _builder(datasets: ModuleType, path: str, subset: str | None) -> Any:
    try:
        return datasets.load_dataset_builder(path, subset)
    except (ValueError, FileNotFoundError):
        with suppress(ValueError, FileNotFoundError):  # Without a README.md, a subset is a sub-folder.
            if subset:
                return datasets.load_dataset_builder(path, data_dir=subset)
        raise


@contextmanager
def _library_errors(message: str, way_out: str) -> Iterator[None]:
    """Convert any exception to an `InputError`: the library raises exceptions of many unrelated types."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        # If a subset is missing, the second line of the message names the others.
        reason = " ".join(str(error).splitlines()[:2]) or type(error).__name__
        raise InputError(f"{message} ({reason}); {way_out}") from error
