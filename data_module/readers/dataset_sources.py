"""Hugging Face data sets as parallel text: by name from the hub, or a local folder of parquet or JSON files.

Only data files are read: code that comes with a data set is never run.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from data_module.errors import InputError, install
from data_module.settings import TextSource

_COLUMN = "translation"
_CHUNK_ROWS = 10_000
_SHARD = re.compile(r"-\d{5}-of-(\d{5})\.")
# No other format holds a `translation` column, and some could run code.
_FORMATS = ("parquet", "json")

log = logging.getLogger(__name__)


def split_name(text: TextSource) -> str:
    """Return what the row numbers of a data set's split refer to: `wmt/wmt14:de-en:train`."""
    return ":".join(part for part in (text.dataset, text.subset, text.split) if part)


def split_files(text: TextSource) -> dict[str, Path]:
    """Return a split's data files by their names in the data set; those on the hub are downloaded, once.

    Raises:
        InputError: the `datasets` library is missing, there is no such data set, subset or split, or the hub
            cannot be reached.
    """
    return _open_split(text)[1]


def hub_revision(text: TextSource) -> str | None:
    """Return the commit of a data set on the hub; None for every other source."""
    if not text.dataset or Path(text.dataset).exists():
        return None
    return str(_open_split(text)[0].hash)


def split_lines(text: TextSource, languages: tuple[str, str]) -> Iterator[tuple[list[bytes], list[bytes]]]:
    r"""Read a split from its first row to its last, in chunks: a sentence a line, of both languages.

    A null is an empty sentence. A "\n" within a sentence becomes a space, so that the sides stay aligned.

    Raises:
        InputError: see `split_files`; or a file is damaged, or has no such column or languages.
    """
    if languages[0] == languages[1]:
        raise InputError(
            f"{split_name(text)}: corpus.source_language and corpus.target_language are both {languages[0]!r};"
            " name its two languages"
        )
    builder, files = _open_split(text)
    is_empty = True
    for name, path in files.items():
        for table in _tables(builder, name, path, str(text.split)):
            source = _lines(table, name, "corpus.source_language", languages[0])
            target = _lines(table, name, "corpus.target_language", languages[1])
            yield source, target
            is_empty = False
    if is_empty:
        raise InputError(f"{split_name(text)}: the split is empty; name one with text")


def _lines(table: Any, name: str, key: str, language: str) -> list[bytes]:
    """Return one language's column as bytes: a file may hold text that is not UTF-8."""
    import pyarrow as pa
    import pyarrow.compute as compute

    if _COLUMN not in table.column_names:
        raise InputError(
            f"{name}: has no `{_COLUMN}` column, only {', '.join(table.column_names)}; name a data set of translations"
        )
    column = table.column(_COLUMN)
    there = [field.name for field in column.type] if pa.types.is_struct(column.type) else []
    if language not in there:
        raise InputError(
            f"{name}: {language!r} is none of its languages ({', '.join(there) or 'it has none'});"
            f" correct {key}, the name of one"
        )
    try:
        sentences = compute.struct_field(column, language).cast(pa.large_binary()).to_pylist()
    except pa.ArrowException as error:
        raise InputError(f"{name}: its {language!r} is not text; name a data set of translations") from error
    return [(sentence or b"").replace(b"\n", b" ") + b"\n" for sentence in sentences]


def _tables(builder: Any, name: str, path: Path, split: str) -> Iterator[Any]:
    """Yield one file's rows as Arrow tables. A file at a time, because only so an error can name it."""
    if not path.stat().st_size:
        raise InputError(f"{name}: the file is empty; fetch it again")
    read = _parquet_tables(path) if builder.name == "parquet" else _json_tables(builder, path, split)
    while True:
        with _explained(f"{name}: is damaged or of another format", "fetch it again"):
            table = next(read, None)
        if table is None:
            return
        yield table


def _parquet_tables(path: Path) -> Iterator[Any]:
    # Not by the `datasets` library, whose threads can outlive an error and then abort the process as it ends.
    import pyarrow as pa
    import pyarrow.parquet as parquet

    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(_CHUNK_ROWS, use_threads=False):
            yield pa.Table.from_batches([batch])


def _json_tables(builder: Any, path: Path, split: str) -> Iterator[Any]:
    builder.config.data_files = {split: [str(path)]}
    # As the file has it: what README.md says of its columns does not matter.
    builder.info.features = None
    yield from builder.as_streaming_dataset(split).with_format("arrow").iter(_CHUNK_ROWS)


def _open_split(text: TextSource) -> tuple[Any, dict[str, Path]]:
    """Return the library's builder of a split, and the split's files by name."""
    name, split = str(text.dataset), str(text.split)
    folder = Path(name)
    if not folder.exists():
        return _open_on_hub(name, text.subset, split)
    if not folder.is_dir():
        raise InputError(f"{name}: a file, not a data set; name the folder that it is in")
    library = _library()
    # The whole path, because the library takes some names, such as "json", for formats.
    whole = str(folder.resolve())
    with _explained(f"{name}: cannot be read as a data set", "name a folder of parquet or JSON files"):
        builder = _builder(library, name, whole, text.subset)
    files = _files_of_split(builder, name, split)
    return builder, {f"{name}/{file.removeprefix(whole + '/')}": Path(file) for file in files}


@cache
def _open_on_hub(name: str, subset: str | None, split: str) -> tuple[Any, dict[str, Path]]:
    """As `_open_split`. Looked up once, so that all passes of a run read the same revision."""
    library = _library()
    log.info("looking up %s on the Hugging Face hub", name)
    with _explained(
        f"{name}: no such folder, and it cannot be had from the Hugging Face hub",
        f"without a network, run `hf download {name} --repo-type dataset --local-dir FOLDER` where there is one,"
        " and name that folder",
    ):
        try:
            builder = _builder(library, name, name, subset)
        except FileNotFoundError as error:
            raise InputError(
                f"{name}: no such folder, and no such data set on the Hugging Face hub, or none with data files;"
                " correct the name (one that is private or gated needs `hf auth login`)"
            ) from error
        files = _files_of_split(builder, name, split)
        log.info("fetching what is not here yet of %s: %d files", name, len(files))
        paths = library.DownloadManager().download(files)
    names = [f"{name}/{file.removeprefix(builder.base_path + '/')}" for file in files]
    return builder, {name: Path(path) for name, path in zip(names, paths, strict=True)}


def _builder(library: ModuleType, name: str, where: str, subset: str | None) -> Any:
    try:
        builder = library.load_dataset_builder(where, subset)
    except (ValueError, FileNotFoundError):
        builder = _builder_of_folder(library, where, subset)
        if builder is None:
            _check_subset(library, name, where, subset)
            raise
    if builder.name not in _FORMATS:
        raise InputError(f"{name}: its files are read as {builder.name}; name a data set of parquet or JSON files")
    return builder


def _builder_of_folder(library: ModuleType, where: str, subset: str | None) -> Any:
    """A data set whose README.md does not say otherwise, or is not there, has its sub-folders as subsets."""
    try:
        return library.load_dataset_builder(where, data_dir=subset) if subset else None
    except (ValueError, FileNotFoundError):
        return None


def _check_subset(library: ModuleType, name: str, where: str, subset: str | None) -> None:
    """Raise `InputError` if the subset is what is wrong with a data set that the library cannot load."""
    there = library.get_dataset_config_names(where)
    if there == ["default"]:
        there = sorted(path.name for path in Path(where).glob("[!.]*/"))
    if subset not in there:
        wrong = f"there is no subset {subset!r}" if subset else "it has subsets"
        raise InputError(f"{name}: {wrong}; give `subset`, one of: {', '.join(there)}")


def _files_of_split(builder: Any, name: str, split: str) -> list[str]:
    files = {str(key): list(paths) for key, paths in builder.config.data_files.items()}
    if split not in files:
        raise InputError(f"{name}: there is no split {split!r}; give `split`, one of: {', '.join(files)}")
    found, shards = files[split], [int(count) for file in files[split] for count in _SHARD.findall(file)]
    if shards and len(found) < max(shards):
        raise InputError(
            f"{name}: of the {max(shards)} files of {split!r} only {len(found)} are there; fetch the others"
        )
    return found


def _library() -> ModuleType:
    """Import the library, which takes a second, and have it raise its errors without logging them too."""
    try:
        import datasets
        import huggingface_hub
    except ImportError as error:
        raise InputError(f"a `dataset` source needs a library ({error}); run: {install('datasets')}") from error
    if int(datasets.__version__.split(".")[0]) < 4:
        # Earlier ones run code that comes with a data set.
        raise InputError(f"datasets {datasets.__version__} is too old; run: {install('datasets')}")
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)
    huggingface_hub.logging.set_verbosity(logging.CRITICAL)
    return datasets


@contextmanager
def _explained(what: str, way_out: str) -> Iterator[None]:
    """Turn whatever the library raises, which is nearly anything, into one line."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise InputError(f"{what} ({reason}); {way_out}") from error
