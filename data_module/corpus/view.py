"""The view of an epoch: its training pairs, encoded anew from the corpus's text.

A view is a function of (text, tokenizer, settings, seed, epoch), whichever process makes it. A segmentation is drawn
for each word of the text from a table of sampled segmentations, which costs far less than to sample every occurrence:
words are independent of one another in byte-pair encoding. The table is sampled anew for each epoch.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_module.corpus import kept_text, weights
from data_module.corpus.kept_text import KeptText
from data_module.corpus.store import ParallelCorpus, TokenStore, TokenStoreWriter, token_type
from data_module.corpus.weights import epoch_pairs
from data_module.noise import inserted_strings, noise, typos
from data_module.noise.noise import NOISE_KINDS, add_noise, draw_kinds
from data_module.settings import NoiseSettings
from data_module.tokenization import bpe_dropout
from data_module.tokenization.bpe_dropout import MergeTable
from data_module.tokenization.tokenizer import Tokenizer

MAX_SEGMENTATIONS = 16
"""Largest number of segmentations of a word in an epoch; a rarer word has as many as occurrences."""
_PAIRS = 2**15
"""How many pairs are encoded at a time."""
_WORDS = 2**16
"""How many words are segmented at a time."""
_TOKENS = 2**24
"""How many words are counted at a time."""
_MEAN_PAIRS = 10_000
"""How many pairs estimate the mean lengths."""
_TABLE, _CHUNK, _MEAN = 101, 102, 103
"""What is drawn: segmentations, views of chunks, mean lengths. Each has random numbers of its own."""


@dataclass(frozen=True)
class ViewSettings:
    """What an epoch makes of the text."""

    dropout: tuple[float, float]
    """BPE-dropout of source and target."""
    noise: NoiseSettings
    protected: tuple[str, ...]
    """User symbols, which noise leaves alone. Not a set: its order, and with it the identity, differs by process."""
    num_pairs: tuple[int, ...]
    """Pairs of each training source."""
    weights: tuple[float, ...]
    """Weights of the training sources."""
    max_tokens: int
    """A pair with more ids than this on either side keeps its plain ids."""
    seed: int
    """With the epoch, determines all that is drawn."""


class _Rows(NamedTuple):
    """Token ids of sentences: row i is `tokens[starts[i] : starts[i] + lengths[i]]`."""

    tokens: NDArray[np.integer]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]

    def flat(self) -> NDArray[np.integer]:
        """Return the ids of all rows, one after another."""
        return self.tokens[_ranges(self.starts, self.lengths)]


class _Segmentations:
    """Sampled segmentations of words: those of word i begin at `first[i]`, and there are `count[i]` of them."""

    def __init__(
        self,
        words: Iterator[list[str]],
        counts: NDArray[np.integer],
        merges: MergeTable,
        dropout: float,
        random: np.random.Generator,
    ) -> None:
        """Sample up to `MAX_SEGMENTATIONS` segmentations of each word, but no more than it has occurrences.

        Args:
            words: the words, in lists.
            counts: [words] how often each occurs; 0 for words that are not needed.
            merges: segments words.
            dropout: probability of leaving out a merge.
            random: source of all that is drawn.
        """
        self.count = np.minimum(counts, MAX_SEGMENTATIONS if dropout else 1).astype(np.int64)
        self.first = np.cumsum(self.count) - self.count
        ids, lengths, begin = [], [], 0
        for block in words:
            times = self.count[begin : begin + len(block)].tolist()
            begin += len(block)
            repeated = [word for word, n in zip(block, times, strict=True) for _ in range(n)]
            block_ids, block_lengths = merges.sample(repeated, dropout, random)
            ids.append(block_ids)
            lengths.append(block_lengths)
        self.ids = np.concatenate(ids)
        self.lengths = np.concatenate(lengths).astype(np.int64)
        self.starts = np.cumsum(self.lengths) - self.lengths

    def draw(self, words: NDArray[np.integer], row_lengths: NDArray[np.int64], random: np.random.Generator) -> _Rows:
        """Draw a segmentation for each word of the rows.

        Args:
            words: indices of the words of all rows, one row after another.
            row_lengths: number of words of each row, at least 1.
            random: source of all that is drawn.
        """
        count = self.count[words]
        drawn = (random.random(len(words), dtype=np.float32) * count).astype(np.int64)
        # Rounding in float32 may give `count` itself.
        chosen = self.first[words] + np.minimum(drawn, count - 1)
        lengths = self.lengths[chosen]
        tokens = self.ids[_ranges(self.starts[chosen], lengths)]
        rows = np.add.reduceat(lengths, np.cumsum(row_lengths) - row_lengths) if len(row_lengths) else lengths
        return _Rows(tokens, np.cumsum(rows) - rows, rows)


class ViewMaker:
    """Makes the views of a corpus."""

    def __init__(self, corpus: ParallelCorpus, text: KeptText, tokenizer: Tokenizer, settings: ViewSettings) -> None:
        """Prepare; nothing is read before the first view is made.

        Args:
            corpus: the training pairs with their plain token ids.
            text: their text.
            tokenizer: the corpus's.
            settings: what an epoch makes of the text.
        """
        self._corpus, self._text, self._tokenizer = corpus, text, tokenizer
        self._settings = settings

    @cached_property
    def _merges(self) -> MergeTable:
        return MergeTable(self._tokenizer)

    @cached_property
    def identity(self) -> str:
        """A hash of all that views depend on but the epoch: corpus, settings, code and numpy."""
        modules = (kept_text, noise, inserted_strings, typos, bpe_dropout, weights)
        code = b"".join(Path(str(module.__file__)).read_bytes() for module in modules) + Path(__file__).read_bytes()
        key = repr((self._corpus.identity, self._settings, np.__version__))
        return hashlib.sha256(code + key.encode()).hexdigest()

    def write(self, epoch: int, folder: Path) -> None:
        """Write the view of an epoch to an empty folder.

        Raises:
            OSError: the folder cannot be written.
        """
        settings = self._settings
        pairs = epoch_pairs(settings.num_pairs, settings.weights, settings.seed, epoch)
        if pairs is None:
            pairs = np.arange(len(self._corpus), dtype=np.uint32)
        tables = [self._segmentations(side, epoch) for side in range(2)]
        dtype = token_type(self._tokenizer.vocabulary_size)
        with (
            TokenStoreWriter(folder / "source", dtype) as source,
            TokenStoreWriter(folder / "target", dtype) as target,
        ):
            for chunk, begin in enumerate(range(0, len(pairs), _PAIRS)):
                random = self._random(epoch, _CHUNK, chunk)
                encoded = self._encode(pairs[begin : begin + _PAIRS], tables, random)
                for writer, rows in zip((source, target), encoded, strict=True):
                    writer.append_flat(rows.flat(), rows.lengths)

    def open(self, epoch: int, folder: Path) -> ParallelCorpus:
        """Open the view of an epoch that `write` has written to the folder."""
        return ParallelCorpus(
            TokenStore(folder / "source"), TokenStore(folder / "target"), f"{self.identity} {epoch}", self.longest
        )

    @property
    def longest(self) -> int:
        """Number of tokens of the longest sentence that a view may have."""
        return max(self._settings.max_tokens, self._corpus.longest)

    def mean_lengths(self) -> tuple[float, float]:
        """Return the mean numbers of source and target ids in views, estimated from some pairs."""
        settings = self._settings
        epoch = epoch_pairs(settings.num_pairs, settings.weights, settings.seed, 0)
        count = len(self._corpus if epoch is None else epoch)
        pairs = np.unique(np.linspace(0, count - 1, min(count, _MEAN_PAIRS)).astype(np.int64))
        if epoch is not None:
            pairs = epoch[pairs].astype(np.int64)
        random = self._random(0, _MEAN)
        noisy, noisy_texts = self._noisy(pairs, random)
        means = []
        for side, dropout, noisy_text in zip(
            (self._text.source, self._text.target), self._settings.dropout, noisy_texts, strict=True
        ):
            text = self._text.sentences(side, pairs)
            for place, sentence in zip(noisy.tolist(), noisy_text, strict=True):
                text[place] = sentence
            means.append(float(self._encode_text(text, dropout, random).lengths.mean()))
        return means[0], means[1]

    def _random(self, epoch: int, *purpose: int) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence([self._settings.seed, epoch, *purpose])))

    def _segmentations(self, side: int, epoch: int) -> _Segmentations | None:
        """Sample segmentations of all words of a side; None if it has no dropout."""
        dropout = self._settings.dropout[side]
        if not dropout:
            return None
        text = self._text
        words = (text.source, text.target)[side].tokens
        counts = np.zeros(text.num_words, dtype=np.int64)
        for begin in range(0, len(words), _TOKENS):
            counts += np.bincount(words[begin : begin + _TOKENS], minlength=len(counts))
        blocks = (text.words(begin, min(begin + _WORDS, len(counts))) for begin in range(0, len(counts), _WORDS))
        return _Segmentations(blocks, counts, self._merges, dropout, self._random(epoch, _TABLE, side))

    def _encode(
        self, pairs: NDArray[np.integer], tables: list[_Segmentations | None], random: np.random.Generator
    ) -> tuple[_Rows, _Rows]:
        """Return the source and target ids of some pairs."""
        sides = (self._corpus.source, self._corpus.target)
        plain = [_rows_of(side, pairs) for side in sides]
        encoded = [
            rows if table is None else table.draw(*self._words(side, pairs), random)
            for side, (rows, table) in enumerate(zip(plain, tables, strict=True))
        ]
        noisy, texts = self._noisy(pairs, random)
        if len(noisy):
            for side, text in enumerate(texts):
                new = self._encode_text(text, self._settings.dropout[side], random)
                encoded[side] = _replaced(encoded[side], noisy, new)
        too_long = np.flatnonzero((encoded[0].lengths > self.longest) | (encoded[1].lengths > self.longest))
        if len(too_long):
            encoded = [
                _replaced(rows, too_long, _Rows(before.tokens, before.starts[too_long], before.lengths[too_long]))
                for rows, before in zip(encoded, plain, strict=True)
            ]
        return encoded[0], encoded[1]

    def _words(self, side: int, pairs: NDArray[np.integer]) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
        """Return the indices of the words of a side of some pairs, and the number of words of each sentence."""
        rows = _rows_of((self._text.source, self._text.target)[side], pairs)
        return rows.flat(), rows.lengths

    def _noisy(
        self, pairs: NDArray[np.integer], random: np.random.Generator
    ) -> tuple[NDArray[np.int64], tuple[list[str], list[str]]]:
        """Choose the pairs that get noise; return their positions, and their noisy sources and targets."""
        drawn = draw_kinds(self._settings.noise, len(pairs), random)
        noisy = np.flatnonzero(drawn.any(axis=1))
        text, protected = self._text, frozenset(self._settings.protected)
        sources, targets = (text.sentences(side, pairs[noisy]) for side in (text.source, text.target))
        for i, chosen in enumerate(drawn[noisy]):
            kinds = [kind for kind, is_chosen in zip(NOISE_KINDS, chosen.tolist(), strict=True) if is_chosen]
            sources[i], targets[i] = add_noise(sources[i], targets[i], kinds, random, protected)
        return noisy, (sources, targets)

    def _encode_text(self, sentences: list[str], dropout: float, random: np.random.Generator) -> _Rows:
        """Encode sentences, whose words need not be in the table."""
        rows = [sentence.split(" ") for sentence in sentences]
        indices: dict[str, int] = {}
        flat = np.fromiter((indices.setdefault(word, len(indices)) for row in rows for word in row), dtype=np.int64)
        counts = np.bincount(flat, minlength=len(indices))
        table = _Segmentations(iter([list(indices)]), counts, self._merges, dropout, random)
        return table.draw(flat, np.fromiter(map(len, rows), dtype=np.int64, count=len(rows)), random)


def _rows_of(store: TokenStore, indices: NDArray[np.integer]) -> _Rows:
    """Return sentences of a store as views of it."""
    return _Rows(store.tokens, store.offsets[indices], store.lengths[indices].astype(np.int64))


def _replaced(rows: _Rows, places: NDArray[np.int64], new: _Rows) -> _Rows:
    """Return rows of which those at `places` are replaced."""
    flat = rows.flat()
    tokens = np.concatenate([flat, new.flat()])
    starts = np.cumsum(rows.lengths) - rows.lengths
    lengths = rows.lengths.copy()
    starts[places] = len(flat) + np.cumsum(new.lengths) - new.lengths
    lengths[places] = new.lengths
    return _Rows(tokens, starts, lengths)


def _ranges(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the numbers from `starts[i]` to below `starts[i] + lengths[i]`, for one i after another."""
    before = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) + np.repeat(starts - before, lengths)
