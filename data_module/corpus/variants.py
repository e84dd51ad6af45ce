"""Variants of the training split: the same pairs in other encodings, each with noise and BPE-dropout of its own.

Epoch e trains on variant e mod `corpus.variants`. A variant is a function of (text, tokenizer, settings, variant):
pairs are encoded in chunks of a fixed size, and all that a chunk draws is seeded by (seed, variant, chunk). So any
number of processes write the same bytes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from data_module.corpus.manifest import TokenCounts
from data_module.corpus.noise import NOISE_KINDS, add_noise, draw_kinds
from data_module.corpus.store import TokenStoreWriter, store_prefix, token_counts, token_type
from data_module.errors import InputError
from data_module.settings import CorpusSettings
from data_module.system.worker_processes import ignore_signals, num_processors, signals_blocked
from data_module.tokenization.encoders import DropoutEncoder
from data_module.tokenization.tokenizer import Tokenizer

CHUNK_PAIRS = 2**14
"""Pairs per chunk: a few seconds' work. With another chunk size, other random numbers would be drawn."""


class VariantText(AbstractContextManager["VariantText"]):
    """The cleaned text of the training pairs, in a temporary file. It is a context manager that removes the file.

    The text is in chunks of `CHUNK_PAIRS` pairs; the last chunk of a source may have fewer.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "train.text"
        self.chunks: list[tuple[int, int]] = []
        """Where each chunk begins and ends in the file, in bytes."""
        self._file = self.path.open("wb")
        self._lines: list[str] = []
        self._first_of_source = 0

    def append(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Append pairs of a source. Their white space is normalized, so they have no tabs."""
        self._lines += ["\t".join(pair) for pair in pairs]
        while len(self._lines) >= CHUNK_PAIRS:
            self._write_chunk()

    def end_source(self, repeat: int) -> None:
        """End a source, whose pairs occur `repeat` times. Each occurrence is encoded with other random numbers."""
        if self._lines:
            self._write_chunk()
        self.chunks += self.chunks[self._first_of_source :] * (repeat - 1)
        self._first_of_source = len(self.chunks)
        self._file.flush()

    def _write_chunk(self) -> None:
        begin = self._file.tell()
        self._file.write("\n".join(self._lines[:CHUNK_PAIRS]).encode())
        self.chunks.append((begin, self._file.tell()))
        del self._lines[:CHUNK_PAIRS]

    def __exit__(self, *_: object) -> None:
        self.path.unlink(missing_ok=True)
        self._file.close()


_Encoded: TypeAlias = tuple[NDArray[np.integer], NDArray[np.int64]]
"""Sentences of one side: their ids one after another, and the number of ids of each."""


class _ChunkEncoder:
    """Item i is chunk i mod n of variant i // n, encoded, where n is the number of chunks."""

    def __init__(self, text: VariantText, tokenizer: Tokenizer, settings: CorpusSettings) -> None:
        self._path, self._chunks = text.path, text.chunks
        self._tokenizers = tokenizer, tokenizer.target
        dropout = settings.bpe_dropout.source, settings.bpe_dropout.target
        self._dropout_encoders = [DropoutEncoder(tokenizer, rate) if rate else None for rate in dropout]
        self.dtype = token_type(tokenizer.vocabulary_size)
        self._settings = settings
        self._symbols = frozenset([*settings.user_symbols, *tokenizer.user_symbols])

    def __len__(self) -> int:
        return self._settings.variants * len(self._chunks)

    def __getitem__(self, item: int) -> tuple[_Encoded, _Encoded]:
        variant, chunk = divmod(item, len(self._chunks))
        random = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self._settings.seed, variant, chunk])))
        plain = self._text(chunk)
        noisy = self._with_noise(plain, random)
        sides: list[list[NDArray[np.int32]]] = []
        for side, (tokenizer, dropout) in enumerate(zip(self._tokenizers, self._dropout_encoders, strict=True)):
            sentences, seed = [pair[side] for pair in noisy], int(random.integers(2**63))
            sides.append(dropout.encode(sentences, seed) if dropout else tokenizer.encode(sentences))
        longest = self._settings.max_tokens
        too_long = [i for i, pair in enumerate(zip(*sides, strict=True)) if max(map(len, pair)) > longest]
        for side, tokenizer in enumerate(self._tokenizers):
            plain_ids = tokenizer.encode([plain[i][side] for i in too_long])
            for i, ids in zip(too_long, plain_ids, strict=True):
                sides[side][i] = ids
        source, target = (
            (np.concatenate(side_ids).astype(self.dtype), np.array([len(ids) for ids in side_ids]))
            for side_ids in sides
        )
        return source, target

    def _text(self, chunk: int) -> list[tuple[str, str]]:
        begin, end = self._chunks[chunk]
        with self._path.open("rb") as file:
            file.seek(begin)
            lines = file.read(end - begin).decode().split("\n")
        return [(source, target) for source, _, target in (line.partition("\t") for line in lines)]

    def _with_noise(self, pairs: list[tuple[str, str]], random: np.random.Generator) -> list[tuple[str, str]]:
        noisy = pairs.copy()
        for i, drawn in enumerate(draw_kinds(self._settings.noise, len(pairs), random).tolist()):
            if any(drawn):
                kinds = [kind for kind, is_drawn in zip(NOISE_KINDS, drawn, strict=True) if is_drawn]
                noisy[i] = add_noise(*pairs[i], kinds, random, self._symbols)
        return noisy


def write_variants(
    folder: Path, text: VariantText, tokenizer: Tokenizer, settings: CorpusSettings, advance: Callable[[int], object]
) -> list[TokenCounts]:
    """Write all variants of the training split, and return the counts of each; variant 0 replaces the plain encoding.

    `advance` is called with the number of pairs that have been written.

    Raises InputError if a process that encodes has been killed.
    """
    encoder = _ChunkEncoder(text, tokenizer, settings)
    encoded, counts = _encode_in_parallel(encoder), []
    try:
        for variant in range(settings.variants):
            with (
                TokenStoreWriter(store_prefix(folder, "train", "source", variant), encoder.dtype) as source,
                TokenStoreWriter(store_prefix(folder, "train", "target", variant), encoder.dtype) as target,
            ):
                for source_chunk, target_chunk in islice(encoded, len(text.chunks)):
                    source.append_flat(*source_chunk)
                    target.append_flat(*target_chunk)
                    advance(len(source_chunk[1]))
            counts.append(token_counts(source, target))
    except RuntimeError as error:
        # PyTorch raises it in a signal handler, at any line. It names the processes, but not why they ended.
        if "exited unexpectedly" not in str(error) and "killed by signal" not in str(error):
            raise
        raise InputError(
            "corpus.variants: a process that encodes text was killed, probably because the memory was full; free"
            " memory, or run prepare on fewer cores (`taskset -c 0` gives it one)"
        ) from error
    return counts


def _encode_in_parallel(encoder: _ChunkEncoder) -> Iterator[tuple[_Encoded, _Encoded]]:
    """Yield all items in order, made by as many processes as there are cores."""
    # A corpus without variants is prepared without torch, which takes seconds to import.
    import torch
    from torch.utils.data import DataLoader

    loader: DataLoader[int] = DataLoader(
        encoder,  # type: ignore[arg-type]
        batch_size=None,
        num_workers=num_processors(),
        collate_fn=tuple,  # of the item, a tuple, which it returns as it is
        worker_init_fn=ignore_signals,
        # Creating an iterator draws from the generator, which must not advance the global one.
        generator=torch.Generator().manual_seed(0),
    )
    with signals_blocked():
        encoded = iter(loader)
    yield from encoded
