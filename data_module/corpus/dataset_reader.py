"""The reader of Hugging Face data sets: by name from the hub, or a local folder of parquet or JSON files.

Only data files are read. Code that comes with a data set is never run.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from data_module.corpus.readers import Reader
from data_module.errors import InputError, install


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
        files: dict[str, Path] = _library().open_split(self.text)[1]
        return files

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
        return {} if Path(name).exists() else {name: str(_library().open_split(self.text)[0].hash)}

    def chunks(self) -> Iterator[tuple[list[bytes], list[bytes]]]:
        r"""Yield the split's rows. A null is an empty sentence, and a "\n" in a sentence becomes a space.

        Raises InputError as `files` does, or if a file is damaged, or has no such column or languages.
        """
        source, target = self.languages
        source_key, target_key = self._key("source_language"), self._key("target_language")
        if source == target:
            raise InputError(
                f"{self.names[0]}: {source_key} and {target_key} are both {source!r}; name its two languages"
            )
        library = _library()
        for name, table in library.tables(self.text):
            yield (
                library.sentences(table, name, source_key, source),
                library.sentences(table, name, target_key, target),
            )

    def _key(self, name: str) -> str:
        """Return the name of a language's key for messages: the source's own key if it is set, else the corpus's."""
        return f"its {name}" if getattr(self.text, name) else f"corpus.{name}"


def _library() -> ModuleType:
    try:
        # Its imports take a second, and need packages of an extra.
        from data_module.corpus import dataset_library
    except ImportError as error:
        raise InputError(f"a `dataset` source needs a library ({error}); run: {install('datasets')}") from error
    return dataset_library
