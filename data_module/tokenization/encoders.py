"""Encoders of large texts: each distinct word once, and with BPE-dropout."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from random import Random

import numpy as np
from numpy.typing import NDArray

from data_module.system.worker_processes import num_processors
from data_module.tokenization.tokenizer import SPACE_MARK, Tokenizer

# Enough for the frequent words of a large corpus; about 300 MB.
_MAX_CACHED_WORDS = 1_000_000
MAX_SEGMENTATIONS = 16
"""Largest number of segmentations of a word in one call; a rarer word has one for each occurrence."""
MAX_CHARACTERS = 500
"""A longer word gets its plain segmentation, because time grows with the square of its length."""
_NO_MERGE = float("inf")


class WordEncoder:
    """Encodes sentences five times as fast as the tokenizer, by caching the ids of each word.

    The result is the same, because pieces are parts of words, and a sentence in which the place of a word matters is
    encoded as a whole. So are all sentences of a model with other pieces (`Tokenizer.splits_words`), or of another type
    than byte-pair encoding: `unigram` adds up the scores of a sentence, whose rounding may decide between two
    segmentations, and neighbouring unknown words may be one piece.
    """

    def __init__(self, tokenizer: Tokenizer, dtype: np.dtype) -> None:
        self.dtype, self.tokenizer = dtype, tokenizer
        self._ids: dict[str, bytes] = {}

    def encode(self, sentences: list[str]) -> tuple[list[bytes], np.ndarray]:
        """Encode sentences whose white space is normalized.

        Returns:
            The ids of each sentence, as the bytes of an array of `dtype`, and the lengths in ids, int64 [sentences].
        """
        if not (self.tokenizer.is_bpe or (self.tokenizer.pair and self.tokenizer.splits_words)):
            whole = self.tokenizer.encode_cleaned(sentences, num_threads=num_processors())
            return [ids.astype(self.dtype).tobytes() for ids in whole], np.array(list(map(len, whole)), dtype=np.int64)
        if len(self._ids) > _MAX_CACHED_WORDS:
            self._ids.clear()
        split = [sentence.split(" ") for sentence in sentences]
        new_words = list(set().union(*split).difference(self._ids))
        new_ids = self.tokenizer.encode_cleaned(new_words, num_threads=num_processors())
        self._ids.update((word, ids.astype(self.dtype).tobytes()) for word, ids in zip(new_words, new_ids, strict=True))
        ids_of = self._ids.__getitem__
        encoded = [b"".join(map(ids_of, words)) for words in split]
        if self.tokenizer.pair:
            # Encoded word by word, a language code would become its piece at any place. The tokenizer treats it as a
            # code only at the beginning of a line.
            places = [place for place, sentence in enumerate(sentences) if " >>" in sentence]
            whole = self.tokenizer.encode_cleaned([sentences[place] for place in places])
            for place, ids in zip(places, whole, strict=True):
                encoded[place] = ids.astype(self.dtype).tobytes()
        lengths = np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded))
        return encoded, lengths // self.dtype.itemsize


class DropoutEncoder:
    """Encodes sentences with BPE-dropout (Provilkov, Emelianenko and Voita 2020, Algorithm 1): words split at random.

    A word starts as its characters. At each step, every possible merge of two neighbours is left out with probability
    `dropout`, and the remaining merge with the highest priority is applied. The segmentation ends when none remains.

    sentencepiece has BPE-dropout too, but no seed makes two processes draw the same numbers: it mixes a number of the
    process into the seed. It also drops a merge for good, where the paper's algorithm may apply it at a later step.
    """

    def __init__(self, tokenizer: Tokenizer, dropout: float) -> None:
        """Read the merges: two pieces can be merged if their concatenation is a piece, whose score is the priority.

        The tokenizer must be a byte-pair encoding; see `Tokenizer.is_bpe`. With a dropout of 0 the result is that of
        `Tokenizer.encode`, with 1 it is the characters.
        """
        proto = tokenizer.proto()
        kinds = proto.SentencePiece
        self._tokenizer, self._dropout = tokenizer, dropout
        self._ids = {piece.piece: i for i, piece in enumerate(proto.pieces) if piece.type == kinds.NORMAL}
        self._ranks = {piece: -proto.pieces[i].score for piece, i in self._ids.items()}
        symbols = [re.escape(piece.piece) for piece in proto.pieces if piece.type == kinds.USER_DEFINED]
        self._symbols = re.compile("|".join(symbols) or r"(?!)")
        self._characters = {piece for piece in self._ids if len(piece) == 1}

    def encode(self, sentences: Sequence[str], seed: int) -> list[NDArray[np.int32]]:
        """Return the ids of each sentence. The result is a function of the arguments and the tokenizer.

        A word that occurs often has `MAX_SEGMENTATIONS` segmentations, of which each occurrence takes one at random.
        Words with a user symbol or a character that has no piece, and very long ones, get their plain segmentation.
        The white space of the sentences is normalized.
        """
        draw = Random(seed).random
        split = [sentence.split(" ") for sentence in sentences]
        counts = Counter(chain.from_iterable(split))
        spellings = self._tokenizer.normalize(list(counts))
        options: dict[str, list[list[int]]] = {}
        plain = []
        for word, normalized, count in zip(counts, spellings, counts.values(), strict=True):
            pieces = [SPACE_MARK, *normalized.removeprefix(SPACE_MARK)]
            is_spelled = 1 < len(pieces) <= MAX_CHARACTERS and self._characters.issuperset(pieces)
            if not is_spelled or self._symbols.search(normalized):
                plain.append(word)
            else:
                options[word] = [self._segment(pieces, draw) for _ in range(min(count, MAX_SEGMENTATIONS))]
        for word, ids in zip(plain, self._tokenizer.encode_cleaned(plain), strict=True):
            options[word] = [ids.tolist()]
        encoded = []
        for words in split:
            choices = map(options.__getitem__, words)
            chosen = [ids[int(draw() * len(ids))] if len(ids) > 1 else ids[0] for ids in choices]
            encoded.append(np.fromiter(chain.from_iterable(chosen), dtype=np.int32))
        return encoded

    def _segment(self, characters: Sequence[str], draw: Callable[[], float]) -> list[int]:
        """Return the ids of a word, whose first character is the space before it."""
        pieces, dropout, rank_of = list(characters), self._dropout, self._ranks.get
        ranks = [rank_of(left + right, _NO_MERGE) for left, right in pairwise(pieces)]
        while True:
            # Of merges with equal ranks, the first one wins.
            kept = [(rank, i) for i, rank in enumerate(ranks) if rank < _NO_MERGE and draw() >= dropout]
            if not kept:
                return [self._ids[piece] for piece in pieces]
            i = min(kept)[1]
            pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
            del ranks[i]
            if i > 0:
                ranks[i - 1] = rank_of(pieces[i - 1] + pieces[i], _NO_MERGE)
            if i < len(ranks):
                ranks[i] = rank_of(pieces[i] + pieces[i + 1], _NO_MERGE)
