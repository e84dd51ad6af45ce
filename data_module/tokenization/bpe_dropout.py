"""BPE-dropout: words segmented at random (Provilkov, Emelianenko and Voita 2020, ACL, Algorithm 1).

A word starts as its characters. At each step, every possible merge of two neighbours is left out with probability
`dropout`, and of those left the one with the highest priority is applied. The segmentation ends when none is left.
Many words are segmented at once with numpy.
"""

import re
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from data_module.errors import InputError
from data_module.tokenization.tokenizer import Tokenizer

# Characters of the words that are segmented at the same time. Their arrays then fit a core's cache.
_CHUNK_CHARACTERS = 1 << 15
_SPACE = "\u2581"
_NO_PIECE = -1
_NO_MERGE = np.int64(-1) << 32
_LAST_POSITION = np.int64((1 << 32) - 1)
_NO_IDS = np.empty(0, dtype=np.int32)

# SplitMix64 (Steele, Lea and Flood 2014, OOPSLA, figure 17).
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)
_LAST_SHIFT = np.uint64(31)


class MergeTable:
    """The merges of a byte-pair encoding, and the segmentation of many words with and without BPE-dropout."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Read the merges from a tokenizer.

        Two pieces can be merged if their concatenation is a piece. The score of that piece is the merge's priority.

        Raises:
            InputError: the tokenizer is no byte-pair encoding.
        """
        from sentencepiece import sentencepiece_model_pb2

        proto = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.model)  # type: ignore[attr-defined]
        if tokenizer.pair or proto.trainer_spec.model_type != proto.trainer_spec.BPE:
            raise InputError("corpus.bpe_dropout: the tokenizer is no byte-pair encoding; create one with prepare")
        piece_types = proto.SentencePiece
        ids = {p.piece: i for i, p in enumerate(proto.pieces) if p.type == piece_types.NORMAL}
        symbols = [re.escape(p.piece) for p in proto.pieces if p.type == piece_types.USER_DEFINED]
        self._tokenizer = tokenizer
        self._symbols = re.compile("|".join(symbols)) if symbols else None
        self._changes_characters = bool(proto.normalizer_spec.precompiled_charsmap)
        self._space_id = ids.get(_SPACE, _NO_PIECE)
        self._character_ids = np.full(0x110000, _NO_PIECE, dtype=np.int32)
        for piece, i in ids.items():
            if len(piece) == 1 and piece != _SPACE:
                self._character_ids[ord(piece)] = i
        # Merges of equal priority have equal ranks, which leaves the choice to their position.
        ranks = np.unique([p.score for p in proto.pieces], return_inverse=True)[1].astype(np.int64)
        merges = np.array(
            [
                (ids[left], ids[right], i)
                for piece, i in ids.items()
                for left, right in ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
                if left in ids and right in ids
            ],
            dtype=np.int64,
        ).reshape(-1, 3)
        keys = (merges[:, 0] << 32) | merges[:, 1]
        order = np.argsort(keys)
        # The last entry stands for every pair that is no merge.
        self._keys = np.append(keys[order], np.iinfo(np.int64).max)
        self._merged = np.append(merges[order, 2], _NO_PIECE).astype(np.int32)
        self._ranks = np.append(ranks[merges[order, 2]] << 32, _NO_MERGE)

    def sample(
        self, words: Sequence[str], dropout: float, random: np.random.Generator
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Segment each word, independently of the others.

        The result depends on the tokenizer, `dropout`, the words in their order, and the state of `random`, from which
        one 64-bit number per word is drawn. It does not depend on how a list of words is split into calls.

        Words that contain a character without a piece, or a user symbol, get their plain segmentation.

        Args:
            words: words without white space. A tokenizer that lower-cases may be given upper case.
            dropout: probability in [0, 1] to leave a merge out. With 0 the result equals `Tokenizer.encode`, with 1 it
                is the characters.
            random: source of the random numbers.

        Returns:
            The ids of all words, in the words' order, and the number of ids of each word, int64 [words].
        """
        keys = random.integers(0, 1 << 64, size=len(words), dtype=np.uint64)
        codes, sizes = self._characters(words)
        plain = np.flatnonzero(sizes == 0)
        rows = self._tokenizer.encode([words[i] for i in plain.tolist()])
        parts = [(plain, np.concatenate([*rows, _NO_IDS]), np.array([len(row) for row in rows], dtype=np.int64))]
        starts = np.cumsum(sizes) - sizes
        for chunk in _chunks(sizes):
            characters = _columns(codes, starts[chunk], sizes[chunk], self._space_id)
            parts.append((chunk, *self._segment(characters, dropout, keys[chunk])))
        order, ids, lengths = map(np.concatenate, zip(*parts, strict=True))
        return _reorder(ids, lengths, order)

    def _characters(self, words: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return the id of every character of all words, and the number of characters of each word.

        The number is 0 for the words that get their plain segmentation; their characters are left out.
        """
        count = len(words)
        if self._changes_characters:
            words = [word.removeprefix(_SPACE) for word in self._tokenizer.normalize(words)]
        # User symbols are matched after normalization, which leaves them as they are.
        symbols = self._words_with_symbols(words)
        sizes = np.fromiter(map(len, words), dtype=np.int64, count=count)
        codes = self._character_ids[np.frombuffer("".join(words).encode("utf-32-le"), dtype=np.uint32)]
        word_of = np.repeat(np.arange(count), sizes)
        plain = sizes == 0
        plain[symbols] = True
        plain[word_of[codes == _NO_PIECE]] = True
        if self._space_id == _NO_PIECE:
            plain[:] = True
        if plain.any():
            codes = codes[~plain[word_of]]
            sizes[plain] = 0
        return codes, sizes

    def _words_with_symbols(self, words: Sequence[str]) -> NDArray[np.int64]:
        """Return the indices of the words that contain a user symbol."""
        text = "\n".join(words) if self._symbols else ""
        starts = [match.start() for match in self._symbols.finditer(text)] if self._symbols else []
        if not starts:
            return np.empty(0, dtype=np.int64)
        ends = np.cumsum(np.fromiter(map(len, words), dtype=np.int64, count=len(words)) + 1)
        return np.searchsorted(ends, starts, side="right")

    def _segment(
        self, pieces: NDArray[np.int32], dropout: float, keys: NDArray[np.uint64]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Segment words of similar length.

        Args:
            pieces: the characters' ids, int32 [positions + 1, words], padded with `_NO_PIECE`. The last row is padding.
                It is overwritten.
            dropout: probability to leave a merge out.
            keys: one random number per word, uint64 [words].

        Returns:
            The ids of all words, and the number of ids of each word.
        """
        end, count = len(pieces) - 1, len(keys)
        # The pieces of a word are a linked list. A piece keeps the position of its first character.
        position = np.arange(end + 1, dtype=np.int64)[:, None]
        following = np.repeat(np.minimum(position + 1, end), count, axis=1).ravel()
        previous = np.repeat(np.where(position == 0, end, position - 1), count, axis=1).ravel()
        pieces = pieces.ravel()
        # A merge's priority: its rank in the upper 32 bits, then the position, so that the first of equal rank wins.
        # Negative numbers are no merges.
        merged = np.full_like(pieces, _NO_PIECE)
        merged[:-count], ranks = self._merges(pieces[:-count], pieces[count:])
        priority = np.full((end + 1, count), _NO_MERGE)
        priority[:-1] = ranks.reshape(end, count) + (_LAST_POSITION - position[:-1])
        draws = _Draws(keys, end, dropout)
        flat = priority.ravel()
        for step in range(end):
            best = draws.keep(priority[:-1], step).max(axis=0)
            done = best < 0
            if done.all():
                break
            # A word ends at the first step that applies no merge.
            priority[:, done] = _NO_MERGE
            word = np.flatnonzero(~done)
            left_position = _LAST_POSITION - (best[word] & _LAST_POSITION)
            left = left_position * count + word
            right = following[left] * count + word
            after_position = following[right]
            after = after_position * count + word
            before_position = previous[left]
            before = before_position * count + word
            pieces[left] = merged[left]
            pieces[right] = _NO_PIECE
            flat[right] = _NO_MERGE
            following[left] = after_position
            previous[after] = left_position
            changed = np.concatenate([before, left])
            merged[changed], ranks = self._merges(pieces[changed], np.concatenate([pieces[left], pieces[after]]))
            flat[changed] = ranks + (_LAST_POSITION - np.concatenate([before_position, left_position]))
        columns = pieces.reshape(end + 1, count)[:-1].T
        used = columns != _NO_PIECE
        return columns[used], used.sum(axis=1)

    def _merges(self, left: NDArray[np.int32], right: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return the piece that each pair of pieces merges into, and its rank in the upper 32 bits."""
        keys = (left.astype(np.int64) << 32) | right
        index = np.searchsorted(self._keys, keys)
        index[self._keys[index] != keys] = len(self._keys) - 1
        return self._merged[index], self._ranks[index]


class _Draws:
    """The random numbers that leave merges out: a function of a word's key, the step and the position.

    They do not depend on the other words that are segmented at the same time.
    """

    def __init__(self, keys: NDArray[np.uint64], positions: int, dropout: float) -> None:
        self._keys = keys
        self._positions = np.arange(positions, dtype=np.uint64)
        self._dropped = dropout > 0
        # A merge is left out if its number is at most this.
        self._limit = np.uint64(max(int(dropout * 2.0**64) - 1, 0))
        self._numbers = np.empty((positions, len(keys)), dtype=np.uint64)
        self._shifted = np.empty_like(self._numbers)

    def keep(self, priority: NDArray[np.int64], step: int) -> NDArray[np.int64]:
        """Return the priorities of the merges that are not left out in this step, and a negative number elsewhere."""
        if not self._dropped:
            return priority
        counters = (self._positions + np.uint64(1) + np.uint64(step << 32)) * _GAMMA
        numbers = np.add(counters[:, None], self._keys, out=self._numbers)
        for shift, factor in _MIX:
            numbers ^= np.right_shift(numbers, shift, out=self._shifted)
            numbers *= factor
        numbers ^= np.right_shift(numbers, _LAST_SHIFT, out=self._shifted)
        return np.where(numbers > self._limit, priority, _NO_MERGE)


def _chunks(sizes: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Split the indices of the words of at least one character into chunks of words of similar size."""
    order = np.argsort(sizes, kind="stable")[np.count_nonzero(sizes == 0) :]
    start = 0
    while start < len(order):
        # The chunk's last word is its longest one.
        longest = int(sizes[order[min(start + _CHUNK_CHARACTERS // int(sizes[order[start]]), len(order)) - 1]])
        stop = start + max(_CHUNK_CHARACTERS // longest, 1)
        yield order[start:stop]
        start = stop


def _columns(
    codes: NDArray[np.int32], starts: NDArray[np.int64], sizes: NDArray[np.int64], first: int
) -> NDArray[np.int32]:
    """Return words as the columns of an array: the piece `first`, the word's characters, padding of at least one."""
    columns = np.full((int(sizes.max()) + 2, len(sizes)), _NO_PIECE, dtype=np.int32)
    columns[0] = first
    offsets = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    words = np.repeat(np.arange(len(sizes)), sizes)
    columns[offsets + 1, words] = codes[np.repeat(starts, sizes) + offsets]
    return columns


def _reorder(
    ids: NDArray[np.int32], lengths: NDArray[np.int64], order: NDArray[np.int64]
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return ids and lengths of the words in their own order. The arguments have word `order[i]` at position i."""
    starts = np.empty_like(lengths)
    starts[order] = np.cumsum(lengths) - lengths
    sizes = np.empty_like(lengths)
    sizes[order] = lengths
    offsets = np.arange(len(ids)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return ids[np.repeat(starts, sizes) + offsets], sizes
