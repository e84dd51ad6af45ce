"""The cleaned training text of a corpus, as indices into a table of its distinct words.

Sentences are the words of the table joined by spaces, so nothing is lost. Words are encoded once each, however often
they occur, and a store of indices is memory-mapped like one of token ids.
"""

from contextlib import ExitStack
from functools import cached_property
from itertools import chain
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from data_module.corpus.store import TokenStore, TokenStoreWriter, store_prefix

_TABLE_NAME = "train.words.txt"
_INDEX_TYPE = np.dtype(np.uint32)
_NEWLINE = 10


class KeptTextWriter:
    """Writes the text of training pairs beside their token ids. It is a context manager.

    Memory grows with the number of distinct words, about 0.2 kB for each.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / _TABLE_NAME
        self._indices: dict[str, int] = {}
        self._stack = ExitStack()
        self._sides = [
            self._stack.enter_context(TokenStoreWriter(_prefix(folder, side), _INDEX_TYPE))
            for side in ("source", "target")
        ]

    def __len__(self) -> int:
        return len(self._sides[0])

    def append(self, pairs: list[tuple[str, str]]) -> None:
        """Append cleaned pairs."""
        indices = self._indices
        for side, writer in enumerate(self._sides):
            rows = [pair[side].split(" ") for pair in pairs]
            # Sorted, because the order of a set of strings differs from process to process.
            for word in sorted(set().union(*rows).difference(indices)):
                indices[word] = len(indices)
            flat = np.fromiter(map(indices.__getitem__, chain.from_iterable(rows)), dtype=_INDEX_TYPE)
            writer.append_flat(flat, np.fromiter(map(len, rows), dtype=np.int64, count=len(rows)))

    def repeat_from(self, start: int, times: int) -> None:
        """Append all pairs from index `start` on again, `times` times."""
        for writer in self._sides:
            writer.repeat_from(start, times)

    def __enter__(self) -> "KeptTextWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)
        if error is None:
            with self._path.open("w", encoding="utf-8", newline="\n") as file:
                file.writelines(f"{word}\n" for word in self._indices)


class KeptText:
    """The text that `KeptTextWriter` has written, memory-mapped."""

    def __init__(self, folder: Path) -> None:
        """Open the text of a corpus folder; nothing is read before it is used."""
        self._path = folder / _TABLE_NAME
        self.source = TokenStore(_prefix(folder, "source"))
        self.target = TokenStore(_prefix(folder, "target"))

    @staticmethod
    def is_in(folder: Path) -> bool:
        """Return whether a corpus folder has its text."""
        return (folder / _TABLE_NAME).exists()

    @cached_property
    def _table(self) -> NDArray[np.uint8]:
        return np.memmap(self._path, dtype=np.uint8, mode="r")

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        """int64 [words + 1]: where each word ends, after a zero before the first one."""
        block = 2**24  # so that memory does not grow with the table's size
        parts = [
            np.flatnonzero(self._table[start : start + block] == _NEWLINE) + start + 1
            for start in range(0, len(self._table), block)
        ]
        return np.concatenate([np.zeros(1, dtype=np.int64), *parts])

    @property
    def num_words(self) -> int:
        """Number of distinct words."""
        return len(self._ends) - 1

    def words(self, start: int, stop: int) -> list[str]:
        """Return the words of the table from index `start` to `stop`."""
        return self._table[self._ends[start] : self._ends[stop]].tobytes().decode().split("\n")[:-1]

    def sentences(self, side: TokenStore, pairs: NDArray[np.integer]) -> list[str]:
        """Return the sentences of the side, `self.source` or `self.target`, of these pairs."""
        rows = [side[int(pair)] for pair in pairs]
        if not rows:
            return []
        used, places = np.unique(np.concatenate(rows), return_inverse=True)
        ends = self._ends
        table = [self._table[ends[word] : ends[word + 1] - 1].tobytes().decode() for word in used.tolist()]
        words = map(table.__getitem__, places.tolist())
        return [" ".join(next(words) for _ in range(len(row))) for row in rows]


def _prefix(folder: Path, side: str) -> Path:
    return store_prefix(folder, "train", f"{side}.words")
