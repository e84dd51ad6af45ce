"""The memory-mapped corpus: its token stores written and read, and a split's two sides opened together.

A store is three .npy files beside each other: all token ids in one flat array, the offsets of the sentences
in it, and their lengths. Opening one reads no tokens; processes of a node share its pages.
"""

import hashlib
import logging
import threading
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from data_module.corpus.manifest import MANIFEST_NAME, TOKENIZER_NAME, read_manifest
from data_module.errors import InputError
from data_module.tokenization.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_ARRAYS = ("lengths", "tokens", "offsets")
MAX_TOKENS = np.iinfo(np.uint16).max - 1  # batches count the end symbol in 16 bits too
"""No sentence is longer than this, because lengths are 16-bit."""


def token_type(vocabulary_size: int) -> np.dtype:
    """Return the smallest unsigned type, of 16 or 32 bits, that holds every id of the vocabulary."""
    return np.dtype(np.uint16 if vocabulary_size <= 2**16 else np.uint32)


class _ArrayWriter:
    """A one-dimensional .npy file that grows by appending and holds nothing in memory."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self.dtype = dtype
        self.length = 0
        self._file = path.open("w+b")
        self._write_header()
        self._header_bytes = self._file.tell()

    def _write_header(self) -> None:
        # numpy leaves room in the header, so that another length takes as many bytes.
        header = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self._file, header)

    def append(self, values: np.ndarray) -> None:
        self._file.write(np.ascontiguousarray(values, dtype=self.dtype).data)
        self.length += len(values)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return a copy of values that were appended earlier."""
        self._file.seek(self._header_bytes + start * self.dtype.itemsize)
        values = np.frombuffer(self._file.read((stop - start) * self.dtype.itemsize), dtype=self.dtype)
        self._file.seek(0, 2)
        return values

    def close(self) -> None:
        self._file.seek(0)
        self._write_header()
        self._file.close()


class TokenStoreWriter:
    """Writes a token store by appending sentences; its memory does not grow. A context manager.

    A store is readable once it is closed.
    """

    def __init__(self, prefix: Path, dtype: np.dtype) -> None:
        self.dtype = np.dtype(dtype)
        self.num_tokens = 0
        self.longest = 0
        self._tokens = _ArrayWriter(_path(prefix, "tokens"), self.dtype)
        self._lengths = _ArrayWriter(_path(prefix, "lengths"), np.dtype(np.uint16))
        self._offsets = _ArrayWriter(_path(prefix, "offsets"), np.dtype(np.int64))
        self._offsets.append(np.zeros(1, dtype=np.int64))

    def __len__(self) -> int:
        return self._lengths.length

    def append_flat(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Append sentences whose ids follow each other in `tokens`, `lengths[i]` of them for sentence i.

        Raises ValueError for a sentence of more than `MAX_TOKENS`.
        """
        longest = int(lengths.max(initial=0))
        if longest > MAX_TOKENS:
            raise ValueError(f"a sentence of {longest} tokens does not fit 16-bit lengths")
        ends = self.num_tokens + np.cumsum(lengths, dtype=np.int64)
        self._tokens.append(tokens)
        self._lengths.append(lengths)
        self._offsets.append(ends)
        self.num_tokens += len(tokens)
        self.longest = max(self.longest, longest)

    def repeat_from(self, start: int, times: int, block: int = 2**17) -> None:
        """Append every sentence from `start` on, `times` more times, in blocks of sentences."""
        stop = len(self)
        for _ in range(times):
            for begin in range(start, stop, block):
                end = min(begin + block, stop)
                offsets = self._offsets.read(begin, end + 1)
                tokens = self._tokens.read(int(offsets[0]), int(offsets[-1]))
                self.append_flat(tokens, np.diff(offsets))

    def close(self) -> None:
        """Complete the files; the store can be opened now."""
        for writer in (self._tokens, self._lengths, self._offsets):
            writer.close()

    def __enter__(self) -> "TokenStoreWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TokenStore:
    """A written token store, mapped on first use. It pickles as its path and is mapped anew by a worker.

    Sentence i is `tokens[offsets[i]:offsets[i + 1]]`, without special ids, and `lengths[i]` long.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = Path(prefix)

    @cached_property
    def tokens(self) -> np.ndarray:
        """All token ids, uint16 or uint32."""
        return self._map("tokens")

    @cached_property
    def offsets(self) -> np.ndarray:
        """Where each sentence begins in `tokens`, and where the last one ends: int64, one more than those."""
        return self._map("offsets")

    @cached_property
    def lengths(self) -> np.ndarray:
        """The tokens of each sentence, uint16."""
        return self._map("lengths")

    def _map(self, name: str) -> np.ndarray:
        path = _path(self.prefix, name)
        try:
            # A plain array over the map: np.memmap's own indexing is several times slower.
            return np.asarray(np.load(path, mmap_mode="r"))
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: cannot open the corpus ({error}); run prepare with --force") from error

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        """Return the ids of one sentence, a read-only view of the file."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sentence {index} of {len(self)}")
        index %= len(self)
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def __getstate__(self) -> dict[str, Any]:
        return {"prefix": self.prefix}


def with_end_symbol(store: TokenStore) -> np.ndarray:
    """Lengths, uint16 [sentences], as batches have them."""
    return store.lengths + np.uint16(1)


class ParallelCorpus:
    """One split's pairs: sentence i of `source` translates to sentence i of `target`."""

    def __init__(self, source: TokenStore, target: TokenStore, identity: str, longest: int) -> None:
        self.source = source
        self.target = target
        self.identity = identity
        """Differs from that of any corpus that was made from other texts or settings."""
        self.longest = longest
        """The tokens of the longest sentence of either side."""

    def __len__(self) -> int:
        return len(self.source)


def store_prefix(folder: Path, split: str, side: str) -> Path:
    """Return where the store of a split ("train", "validation") and side ("source", "target") lies."""
    return folder / f"{split}.{side}"


def open_corpus(folder: Path, split: str) -> ParallelCorpus:
    """Open a split, "train" or "validation", of a corpus folder; takes no time that grows with the corpus.

    Raises:
        InputError: there is no corpus, or it is truncated, of another format version, or its tokenizer is
            not the one it was made with.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if Tokenizer.load(folder / TOKENIZER_NAME).sha256 != manifest["tokenizer"]["sha256"]:
        raise InputError(
            f"{folder / TOKENIZER_NAME}: not the tokenizer that the corpus was made with;"
            " run `python -m pipeline prepare` with --force to rebuild it"
        )
    return ParallelCorpus(
        TokenStore(store_prefix(folder, split, "source")),
        TokenStore(store_prefix(folder, split, "target")),
        identity=hashlib.sha256(split.encode() + (folder / MANIFEST_NAME).read_bytes()).hexdigest(),
        longest=max(manifest[split]["longest_source"], manifest[split]["longest_target"]),
    )


def read_ahead(corpus: ParallelCorpus) -> threading.Thread:
    """Read the corpus once from end to end, in the background, so that its pages lie in this node's memory.

    Training reads thousands of short sentences from everywhere; on a shared file system each would be a request of
    its own. A corpus larger than half of the memory that is free is left alone, with a warning: lay it on a disk
    of the node's own.
    """
    thread = threading.Thread(target=_read, args=(corpus,), daemon=True)
    thread.start()
    return thread


def _read(corpus: ParallelCorpus) -> None:
    # Lengths first: the epoch's plan waits for them.
    paths = [_path(side.prefix, name) for name in _ARRAYS for side in (corpus.source, corpus.target)]
    size = sum(path.stat().st_size for path in paths)
    if size > _free_memory() // 2:
        log.warning("%s: %.1f GB do not fit this node's memory; lay it on its own disk", paths[0].parent, size / 1e9)
        return
    block = bytearray(2**23)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass


def _free_memory() -> int:
    """Bytes that could be used, those of cached files among them."""
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return 2**40


def _path(prefix: Path, name: str) -> Path:
    return prefix.with_name(f"{prefix.name}.{name}.npy")
