"""Hugging Face data sets as Arrow tables, opened with the `datasets` library."""

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.parquet as parquet
import yaml

from data_module.corpus.readers import as_lines
from data_module.errors import InputError, install
from data_module.settings import TextSource

_COLUMN = "translation"
_CHUNK_ROWS = 10_000
_SHARD = re.compile(r"-\d{5}-of-(\d{5})\.")
# No other format holds a `translation` column, and some could run code.
_FORMATS = ("parquet", "json")

log = logging.getLogger(__name__)
# Errors that the library logs are raised as well.
datasets.disable_progress_bars()
datasets.logging.set_verbosity(logging.CRITICAL)
huggingface_hub.logging.set_verbosity(logging.CRITICAL)


def sentences(table: pa.Table, name: str, key: str, language: str) -> list[bytes]:
    """Return one language's sentences. They are read as bytes, because a file may hold invalid UTF-8.

    Messages name the file and `key`, the recipe's key that names the language.

    Raises InputError if the table has no `translation` column, or the column lacks the language or is not text.
    """
    if _COLUMN not in table.column_names:
        raise InputError(
            f"{name}: has no `{_COLUMN}` column, only {', '.join(table.column_names)}; name a data set of translations"
        )
    column = table.column(_COLUMN)
    languages = [field.name for field in column.type] if pa.types.is_struct(column.type) else []
    if language not in languages:
        raise InputError(
            f"{name}: {language!r} is none of its languages ({', '.join(languages) or 'it has none'}); correct {key}"
        )
    try:
        return as_lines(compute.struct_field(column, language).cast(pa.large_binary()).to_pylist())
    except pa.ArrowException as error:
        raise InputError(f"{name}: its {language!r} is not text; name a data set of translations") from error


def tables(text: TextSource) -> Iterator[tuple[str, pa.Table]]:
    """Yield the rows of a split as tables, each with the name of its file.

    Raises InputError as `open_split` does, or if a file is damaged.
    """
    builder, files = open_split(text)
    for name, path in files.items():
        # Files are read separately so that an error can name the file.
        read = _parquet_tables(path) if builder.name == "parquet" else _json_tables(builder, path, str(text.split))
        with _library_errors(f"{name}: is damaged or of another format", "fetch it again"):
            for table in read:
                yield name, table


def _parquet_tables(path: Path) -> Iterator[pa.Table]:
    # The `datasets` library is not used here: after an error its threads can abort the process at exit.
    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(_CHUNK_ROWS, use_threads=False):
            yield pa.Table.from_batches([batch])


def _json_tables(builder: datasets.DatasetBuilder, path: Path, split: str) -> Iterator[pa.Table]:
    builder.config.data_files = {split: [str(path)]}
    # Take the columns from the file, not from README.md.
    builder.info.features = None
    yield from builder.as_streaming_dataset(split).with_format("arrow").iter(_CHUNK_ROWS)


def open_split(text: TextSource) -> tuple[datasets.DatasetBuilder, dict[str, Path]]:
    """Return the library's builder of a split, and the split's files by name.

    Raises InputError if there is no such data set, subset or split, or the hub cannot be reached.
    """
    if int(datasets.__version__.split(".")[0]) < 4:
        # Earlier versions run code that comes with a data set.
        raise InputError(f"datasets {datasets.__version__} is too old; run: {install('datasets')}")
    name, split = str(text.dataset), str(text.split)
    folder = Path(name)
    if not folder.exists():
        return _open_on_hub(name, text.subset, split)
    if not folder.is_dir():
        raise InputError(f"{name}: a file, not a data set; name the folder that it is in")
    # An absolute path, because the library takes some names, such as "json", for formats.
    absolute = str(folder.resolve())
    with _library_errors(
        f"{name}: cannot be read as a data set", "name a folder of parquet or JSON files, and a `subset` of it"
    ):
        _refuse_other_places(name, absolute, _places_in_card(absolute))  # The library would look up an address.
        builder = _builder(name, absolute, text.subset)
    files = _files_of_split(builder, name, split)
    _refuse_other_places(name, absolute, files)
    return builder, {f"{name}/{file.removeprefix(absolute + '/')}": Path(file) for file in files}


@cache
def _open_on_hub(name: str, subset: str | None, split: str) -> tuple[datasets.DatasetBuilder, dict[str, Path]]:
    """Do what `open_split` does for a data set on the hub. Cached, so that every pass reads the same revision."""
    log.info("looking up %s on the Hugging Face hub", name)
    with _library_errors(
        f"{name}: no such folder, and it cannot be fetched from the Hugging Face hub",
        "correct the name and its `subset` (a private or gated data set needs `hf auth login`); without a network, run"
        f" `hf download {name} --repo-type dataset --local-dir FOLDER` on a machine with one, and name that folder",
    ):
        builder = _builder(name, name, subset)
        files = _files_of_split(builder, name, split)
        log.info("downloading %d files of %s, except those in the cache", len(files), name)
        paths = datasets.DownloadManager().download(files)
    names = [f"{name}/{file.removeprefix(builder.base_path + '/')}" for file in files]
    return builder, {name: Path(path) for name, path in zip(names, paths, strict=True)}


def _builder(name: str, path: str, subset: str | None) -> datasets.DatasetBuilder:
    try:
        builder = datasets.load_dataset_builder(path, subset)
    except (ValueError, FileNotFoundError):
        builder = None
        with suppress(ValueError, FileNotFoundError):  # Without a README.md, a subset is a sub-folder.
            builder = datasets.load_dataset_builder(path, data_dir=subset) if subset else None
        if builder is None:
            raise
    if builder.name not in _FORMATS:
        raise InputError(f"{name}: its files are read as {builder.name}; name a data set of parquet or JSON files")
    return builder


def _files_of_split(builder: datasets.DatasetBuilder, name: str, split: str) -> list[str]:
    files = {str(key): list(paths) for key, paths in builder.config.data_files.items()}
    if split not in files:
        raise InputError(f"{name}: there is no split {split!r}; give `split`, one of: {', '.join(files)}")
    paths, shards = files[split], [int(count) for file in files[split] for count in _SHARD.findall(file)]
    if shards and len(paths) < max(shards):
        raise InputError(f"{name}: only {len(paths)} of the {max(shards)} files of {split!r} exist; fetch the others")
    return paths


def _places_in_card(folder: str) -> list[str]:
    """Return all text values in the `configs` of a local data set's card, among them the files that it names."""
    page, extra, places = Path(folder, "README.md"), Path(folder, ".huggingface.yaml"), []
    values: list[object] = []
    if page.is_file():
        values.append(huggingface_hub.DatasetCard.load(page).data.to_dict().get("configs"))
    if extra.is_file():
        values.append(yaml.safe_load(extra.read_text(encoding="utf-8")))
    while values:
        value = values.pop()
        values += value if isinstance(value, list) else value.values() if isinstance(value, dict) else []
        places += [value] if isinstance(value, str) else []
    return places


def _refuse_other_places(name: str, folder: str, places: list[str]) -> None:
    """Raise InputError for a file that is not below a data set's folder. Links in it may lead elsewhere."""
    for place in places:
        if "://" in place or not Path(os.path.normpath(Path(folder, place))).is_relative_to(folder):
            raise InputError(f"{name}: its card names {place}, outside the folder; put the file into the folder")


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
