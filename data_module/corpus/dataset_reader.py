"""The reader of Hugging Face data sets: by name from the hub, or a local folder of parquet or JSON files.

Only data files are read. Code that comes with a data set is never run.
"""

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from data_module.corpus.readers import Reader, as_lines
from data_module.errors import InputError, install
from data_module.settings import TextSource

_COLUMN = "translation"
_CHUNK_ROWS = 10_000
_SHARD = re.compile(r"-\d{5}-of-(\d{5})\.")
# No other format holds a `translation` column, and some could run code.
_FORMATS = ("parquet", "json")

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

        Raises:
            InputError: the `datasets` library is missing, there is no such data set, subset or split, or the hub
                cannot be reached.
        """
        return _open_split(self.text)[1]

    def is_available(self) -> bool:
        """Return whether the data set is a local folder."""
        return Path(str(self.text.dataset)).exists()

    def check(self) -> Iterator[tuple[bool, str]]:
        """Check that the `datasets` library is installed."""
        ok = find_spec("datasets") is not None
        is_local = Path(str(self.text.dataset)).is_dir()
        place = "is a local folder" if is_local else "comes from the Hugging Face hub: prepare needs a network"
        yield ok, f"data set {self.text.dataset} {place}" + ("" if ok else f"; it needs: {install('datasets')}")

    def hub_revisions(self) -> dict[str, str]:
        """Return the commit of a data set on the hub; nothing for a local folder."""
        name = str(self.text.dataset)
        return {} if Path(name).exists() else {name: str(_open_split(self.text)[0].hash)}

    def chunks(self) -> Iterator[tuple[list[bytes], list[bytes]]]:
        r"""Yield the split's rows. A null is an empty sentence, and a "\n" in a sentence becomes a space.

        Raises:
            InputError: see `files`; or a file is damaged, or has no such column or languages.
        """
        source, target = self.languages
        if source == target:
            raise InputError(
                f"{self.names[0]}: {self._key('source_language')} and {self._key('target_language')} are both"
                f" {source!r}; name its two languages"
            )
        builder, files = _open_split(self.text)
        for name, path in files.items():
            for table in _tables(builder, name, path, str(self.text.split)):
                yield (
                    _lines(table, name, self._key("source_language"), source),
                    _lines(table, name, self._key("target_language"), target),
                )

    def _key(self, name: str) -> str:
        """Return what to call the source's language, if it names one, or else the corpus's."""
        return f"its {name}" if getattr(self.text, name) else f"corpus.{name}"


def _lines(table: Any, name: str, key: str, language: str) -> list[bytes]:
    """Return one language's sentences. They are read as bytes, because a file may hold invalid UTF-8."""
    import pyarrow as pa
    import pyarrow.compute as compute

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
        sentences = compute.struct_field(column, language).cast(pa.large_binary()).to_pylist()
    except pa.ArrowException as error:
        raise InputError(f"{name}: its {language!r} is not text; name a data set of translations") from error
    return as_lines(sentences)


def _tables(builder: Any, name: str, path: Path, split: str) -> Iterator[Any]:
    """Yield one file's rows as Arrow tables. Files are read separately so that an error can name the file."""
    read = _parquet_tables(path) if builder.name == "parquet" else _json_tables(builder, path, split)
    while True:
        with _library_errors(f"{name}: is damaged or of another format", "fetch it again"):
            table = next(read, None)
        if table is None:
            return
        yield table


def _parquet_tables(path: Path) -> Iterator[Any]:
    # The `datasets` library is not used here: after an error its threads can abort the process at exit.
    import pyarrow as pa
    import pyarrow.parquet as parquet

    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(_CHUNK_ROWS, use_threads=False):
            yield pa.Table.from_batches([batch])


def _json_tables(builder: Any, path: Path, split: str) -> Iterator[Any]:
    builder.config.data_files = {split: [str(path)]}
    # Take the columns from the file, not from README.md.
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
    # An absolute path, because the library takes some names, such as "json", for formats.
    absolute = str(folder.resolve())
    with _library_errors(f"{name}: cannot be read as a data set", "name a folder of parquet or JSON files"):
        _refuse_other_places(name, absolute, _places_in_card(absolute))  # The library would look up an address.
        builder = _builder(library, name, absolute, text.subset)
    files = _files_of_split(builder, name, split)
    _refuse_other_places(name, absolute, files)
    return builder, {f"{name}/{file.removeprefix(absolute + '/')}": Path(file) for file in files}


def _places_in_card(folder: str) -> list[str]:
    """Return the files that the card of a local data set names, and whatever else its subsets have as text."""
    from huggingface_hub import DatasetCard

    page, extra, places = Path(folder, "README.md"), Path(folder, ".huggingface.yaml"), []
    subsets: list[Any] = [DatasetCard.load(page).data.to_dict().get("configs")] if page.is_file() else []
    if extra.is_file():
        subsets.append(yaml.safe_load(extra.read_text(encoding="utf-8")))
    while subsets:
        value = subsets.pop()
        subsets += value if isinstance(value, list) else value.values() if isinstance(value, dict) else []
        places += [value] if isinstance(value, str) else []
    return places


def _refuse_other_places(name: str, folder: str, places: list[str]) -> None:
    """Raise InputError for a file that is not below a data set's folder. Links in it may lead elsewhere."""
    for place in places:
        if "://" in place or not Path(os.path.normpath(Path(folder, place))).is_relative_to(folder):
            raise InputError(f"{name}: its card names {place}, outside the folder; put the file into the folder")


@cache
def _open_on_hub(name: str, subset: str | None, split: str) -> tuple[Any, dict[str, Path]]:
    """Do what `_open_split` does for a data set on the hub. Cached, so that every pass reads the same revision."""
    library = _library()
    log.info("looking up %s on the Hugging Face hub", name)
    with _library_errors(
        f"{name}: no such folder, and it cannot be fetched from the Hugging Face hub",
        f"without a network, run `hf download {name} --repo-type dataset --local-dir FOLDER` on a machine with one,"
        " and name that folder",
    ):
        try:
            builder = _builder(library, name, name, subset)
        except FileNotFoundError as error:
            raise InputError(
                f"{name}: no such folder, and no such data set on the Hugging Face hub, or none with data files;"
                " correct the name (a private or gated data set needs `hf auth login`)"
            ) from error
        files = _files_of_split(builder, name, split)
        log.info("downloading %d files of %s, except those in the cache", len(files), name)
        paths = library.DownloadManager().download(files)
    names = [f"{name}/{file.removeprefix(builder.base_path + '/')}" for file in files]
    return builder, {name: Path(path) for name, path in zip(names, paths, strict=True)}


def _builder(library: ModuleType, name: str, path: str, subset: str | None) -> Any:
    try:
        builder = library.load_dataset_builder(path, subset)
    except (ValueError, FileNotFoundError):
        builder = _builder_of_folder(library, path, subset)
        if builder is None:
            _check_subset(library, name, path, subset)
            raise
    if builder.name not in _FORMATS:
        raise InputError(f"{name}: its files are read as {builder.name}; name a data set of parquet or JSON files")
    return builder


def _builder_of_folder(library: ModuleType, path: str, subset: str | None) -> Any:
    """Return the builder of a subset that is a sub-folder, for data sets whose README.md lists no subsets, or None."""
    try:
        return library.load_dataset_builder(path, data_dir=subset) if subset else None
    except (ValueError, FileNotFoundError):
        return None


def _check_subset(library: ModuleType, name: str, path: str, subset: str | None) -> None:
    """Raise `InputError` if the library cannot load a data set because of a wrong or missing subset."""
    subsets = library.get_dataset_config_names(path)
    if subsets == ["default"]:
        subsets = sorted(folder.name for folder in Path(path).glob("[!.]*/"))
    if subset not in subsets:
        problem = f"there is no subset {subset!r}" if subset else "it has subsets"
        raise InputError(f"{name}: {problem}; give `subset`, one of: {', '.join(subsets)}")


def _files_of_split(builder: Any, name: str, split: str) -> list[str]:
    files = {str(key): list(paths) for key, paths in builder.config.data_files.items()}
    if split not in files:
        raise InputError(f"{name}: there is no split {split!r}; give `split`, one of: {', '.join(files)}")
    paths, shards = files[split], [int(count) for file in files[split] for count in _SHARD.findall(file)]
    if shards and len(paths) < max(shards):
        raise InputError(
            f"{name}: only {len(paths)} of the {max(shards)} files of {split!r} are there; fetch the others"
        )
    return paths


def _library() -> ModuleType:
    """Import the library, which takes a second, and silence its own logging: its errors are raised as well."""
    try:
        import datasets
        import huggingface_hub
    except ImportError as error:
        raise InputError(f"a `dataset` source needs a library ({error}); run: {install('datasets')}") from error
    if int(datasets.__version__.split(".")[0]) < 4:
        # Earlier versions run code that comes with a data set.
        raise InputError(f"datasets {datasets.__version__} is too old; run: {install('datasets')}")
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)
    huggingface_hub.logging.set_verbosity(logging.CRITICAL)
    return datasets


@contextmanager
def _library_errors(message: str, way_out: str) -> Iterator[None]:
    """Convert any exception to an `InputError`: the library raises exceptions of many unrelated types."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise InputError(f"{message} ({reason}); {way_out}") from error
