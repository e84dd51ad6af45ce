"""Memory-mapped token stores, and the two stores of a split opened as a parallel corpus.

A store consists of three .npy files: all token ids in one flat array, the offsets of the sentences in it, and their
lengths. Opening a store reads no tokens. The processes of a node share its pages.
"""

import hashlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_module.corpus.manifest import Split, TokenCounts, read_manifest
from data_module.errors import PROGRAM, InputError
from data_module.system.files import open_regular
from data_module.tokenization.tokenizer import TOKENIZER_NAME, Tokenizer

MAX_TOKENS = np.iinfo(np.uint16).max - 1  # Batches store lengths in 16 bits too, with EOS.
"""Maximum length of a sentence, because lengths are stored in 16 bits."""

_BLOCK = 2**20
"""Sentences whose lengths, or values that are checked or hashed at a time."""


def token_type(vocabulary_size: int) -> np.dtype:
    """Return the smaller of uint16 and uint32 that can represent every id of the vocabulary."""
    return np.dtype(np.uint16 if vocabulary_size <= 2**16 else np.uint32)


class _ArrayWriter:
    """A one-dimensional .npy file that is written by appending, without keeping data in memory."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self.dtype = dtype
        self.length = 0
        self._file = path.open("w+b")
        self._write_header()
        self._header_bytes = self._file.tell()

    def _write_header(self) -> None:
        # numpy pads the header, so that its size does not depend on the length.
        header = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self._file, header)

    def append(self, values: np.ndarray) -> None:
        self._file.write(np.ascontiguousarray(values, dtype=self.dtype).data)
        self.length += len(values)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return a copy of the values from `start` to `stop`."""
        self._file.seek(self._header_bytes + start * self.dtype.itemsize)
        values = np.frombuffer(self._file.read((stop - start) * self.dtype.itemsize), dtype=self.dtype)
        self._file.seek(0, 2)
        return values

    def close(self) -> None:
        self._file.seek(0)
        self._write_header()
        self._file.close()


class TokenStoreWriter(AbstractContextManager["TokenStoreWriter"]):
    """Writes a token store by appending sentences, with constant memory. It is a context manager.

    The store is readable after `close`.
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
        """Append sentences. Their ids are concatenated in `tokens`; sentence i has `lengths[i]` of them.

        Raises ValueError if a sentence has more than `MAX_TOKENS` ids.
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
        """Append all sentences from index `start` on again, `times` times, in blocks of `block` sentences."""
        stop = len(self)
        for _ in range(times):
            for begin in range(start, stop, block):
                end = min(begin + block, stop)
                offsets = self._offsets.read(begin, end + 1)
                tokens = self._tokens.read(int(offsets[0]), int(offsets[-1]))
                self.append_flat(tokens, np.diff(offsets))

    def close(self) -> None:
        """Complete the files, so that the store can be opened."""
        for writer in (self._tokens, self._lengths, self._offsets):
            writer.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def token_counts(source: TokenStoreWriter, target: TokenStoreWriter) -> TokenCounts:
    """Return the manifest's counts of a split's two stores."""
    return {
        "source_tokens": source.num_tokens,
        "target_tokens": target.num_tokens,
        "longest_source": source.longest,
        "longest_target": target.longest,
    }


class TokenStore:
    """A token store on disk, mapped on first use. It is pickled as its path, and a worker maps it again.

    Sentence i is `tokens[offsets[i]:offsets[i + 1]]`, without special ids, of length `lengths[i]`.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = Path(prefix)

    @cached_property
    def tokens(self) -> np.ndarray:
        """uint16 or uint32 [tokens]: the ids of all sentences."""
        return self._map("tokens")

    @cached_property
    def offsets(self) -> np.ndarray:
        """int64 [sentences + 1]: where each sentence begins in `tokens`, and where the last one ends."""
        return self._map("offsets")

    @cached_property
    def lengths(self) -> np.ndarray:
        """uint16 [sentences]: the number of tokens of each sentence."""
        return self._map("lengths")

    def _map(self, name: str) -> np.ndarray:
        path = _path(self.prefix, name)
        try:
            open_regular(path).close()  # numpy would wait for a named pipe.
            # A plain array of the same memory, because indexing np.memmap is several times slower.
            return np.asarray(np.load(path, mmap_mode="r"))
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: cannot open the corpus ({error}); run prepare with --force") from error

    def map_all(self, longest: int, vocabulary_size: int) -> None:
        """Map all files now: this process and those that it forks keep them if the corpus is replaced or moved.

        Raises InputError if lengths and offsets do not match one another, the tokens or the manifest, which says how
        long the longest sentence is, or if an id is not one of the vocabulary. For that, all tokens are read.
        """
        tokens, offsets, lengths = self.tokens, self.offsets, self.lengths
        types = [tokens.dtype in (np.uint16, np.uint32), offsets.dtype == np.int64, lengths.dtype == np.uint16]
        fits = all(types) and (tokens.ndim, offsets.shape, lengths.ndim) == (1, (len(lengths) + 1,), 1)
        fits = fits and offsets[0] == 0 and offsets[-1] == len(tokens)
        for start in range(0, len(lengths) if fits else 0, _BLOCK):
            block = lengths[start : start + _BLOCK]
            fits = fits and bool((np.diff(offsets[start : start + _BLOCK + 1]) == block).all())
            fits = fits and int(block.max()) <= min(longest, MAX_TOKENS)
        if not fits:
            raise InputError(f"{_path(self.prefix, 'offsets')}: does not match the corpus; run prepare with --force")
        for start in range(0, len(tokens), _BLOCK):
            if (highest := int(tokens[start : start + _BLOCK].max())) >= vocabulary_size:
                raise InputError(
                    f"{_path(self.prefix, 'tokens')}: has the id {highest}, and the tokenizer has {vocabulary_size} "
                    "pieces; run prepare with --force"
                )

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        """Return the ids of one sentence, a read-only view of the file."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def __getstate__(self) -> dict[str, object]:
        return {"prefix": self.prefix}


def lengths_with_eos(store: TokenStore) -> np.ndarray:
    """Return the lengths including EOS, uint16 [sentences]."""
    return store.lengths + np.uint16(1)


@dataclass(frozen=True)
class ParallelCorpus:
    """One split's pairs: sentence i of `source` translates to sentence i of `target`."""

    source: TokenStore
    target: TokenStore
    longest: int
    """Number of tokens of the longest sentence of either side."""
    vocabulary_size: int = 2**32
    """Number of pieces of the tokenizer; every id is below it."""

    def __len__(self) -> int:
        return len(self.source)

    def map_all(self) -> None:
        """Call `TokenStore.map_all` for both sides; raise InputError also if their numbers of sentences differ."""
        for side in (self.source, self.target):
            side.map_all(self.longest, self.vocabulary_size)
        if len(self.source) != len(self.target):
            raise InputError(f"{self.source.prefix}: the target is not as long; run prepare with --force")

    def lengths(self, pairs: NDArray[np.integer]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the source and target lengths of some pairs, including EOS."""
        return self.source.lengths[pairs].astype(np.int64) + 1, self.target.lengths[pairs].astype(np.int64) + 1


def store_prefix(folder: Path, split: str, side: str, variant: int = 0) -> Path:
    """Return the path prefix of the store of a split ("train", "validation") and side ("source", "target")."""
    return folder / (f"{split}.{variant}.{side}" if variant else f"{split}.{side}")


def open_variants(folder: Path) -> list[ParallelCorpus]:
    """Open the encodings of the training split that epochs take in turn, as `open_corpus` does."""
    return [open_corpus(folder, "train", variant) for variant in range(len(read_manifest(folder)["train"]["variants"]))]


def open_corpus(folder: Path, split: Split, variant: int = 0) -> ParallelCorpus:
    """Open a split of a corpus folder: "validation", or a variant of "train".

    The time this takes does not depend on the size of the corpus.

    Raises InputError as `read_manifest` does, or if the tokenizer is not the one that the corpus was made with.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    tokenizer = Tokenizer.load(folder / TOKENIZER_NAME)
    if tokenizer.sha256 != manifest["tokenizer"]["sha256"]:
        raise InputError(
            f"{folder / TOKENIZER_NAME}: not the tokenizer that the corpus was made with;"
            f" run `{PROGRAM} prepare` with --force to rebuild it"
        )
    counts: TokenCounts = manifest["train"]["variants"][variant] if split == "train" else manifest[split]
    return ParallelCorpus(
        TokenStore(store_prefix(folder, split, "source", variant)),
        TokenStore(store_prefix(folder, split, "target", variant)),
        longest=max(counts["longest_source"], counts["longest_target"]),
        vocabulary_size=tokenizer.vocabulary_size,
    )


def training_pairs(folder: Path) -> str:
    """Return the hash of a corpus's training pairs, from its manifest or, for version 1.0 and 1.1, from all tokens.

    Raises InputError as `read_manifest` does.
    """
    manifest = read_manifest(folder)
    return manifest.get("training_pairs") or hash_pairs(folder, len(manifest["train"]["variants"]))


def hash_pairs(folder: Path, num_variants: int) -> str:
    """Return the SHA-256 of the ids of all training pairs in order, in all variants, and of nothing else.

    All tokens are read once, a block at a time.
    """
    digest = hashlib.sha256()
    for variant in range(num_variants):
        for side in ("source", "target"):
            store = TokenStore(store_prefix(folder, "train", side, variant))
            for values in (store.lengths, store.tokens):
                digest.update(f"{len(values)} ".encode())
                for start in range(0, len(values), _BLOCK):
                    digest.update(values[start : start + _BLOCK].data)
    return digest.hexdigest()


def _path(prefix: Path, name: str) -> Path:
    return prefix.with_name(f"{prefix.name}.{name}.npy")
