"""Vocabularies that split a word alike in lower, title and upper case.

Byte-pair encoding learned from cased text has pieces such as `▁house`, but spells `HOUSE` in short pieces, from which a
model recognizes little. Here the merges are learned from the text in lower case, and each merge gets a piece for every
casing that the text has. The result is a common sentencepiece model.
"""

import itertools
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from data_module.errors import InputError
from data_module.tokenization.tokenizer import (
    BYTE_NAMES,
    MIN_CHARACTER_COUNT,
    NUM_SPECIAL_IDS,
    Tokenizer,
    learn_merges,
)
from data_module.tokenization.word_counts import WordCounts

_LOWER, _UPPER, _CAPITAL, _TITLE, _MIXED = range(5)
_SPACE = "\u2581"
# Each word's ids take about a hundred bytes while they are there.
_CHUNK_WORDS = 100_000


def train_on_casings(
    words: WordCounts,
    vocabulary_size: int,
    rarest: float,
    *,
    character_coverage: float = 1.0,
    byte_fallback: bool = False,
    user_symbols: Sequence[str] = (),
) -> bytes:
    """Train a tokenizer whose pieces are the same in all casings of the text.

    Merges are taken in the order in which byte-pair encoding finds them in the text in lower case, each with its
    casings, until the vocabulary is full. For the other arguments and the errors, see `train_tokenizer`.

    Args:
        words: counts of words and characters, with casings; see `add_casings`.
        vocabulary_size: number of ids.
        rarest: the casing of a piece is left out if less than this share of the piece's occurrences has it.
        character_coverage: see `train_tokenizer`.
        byte_fallback: likewise.
        user_symbols: likewise. They keep their casing.
    """
    from sentencepiece import sentencepiece_model_pb2

    lower = WordCounts()
    folded = [_fold(word, user_symbols) for word in words.counts]
    for word, count in zip(folded, words.counts.values(), strict=True):
        lower.counts[word] += count
    lower.add_characters(_fold(words.characters()))
    model = learn_merges(lower, vocabulary_size, character_coverage, byte_fallback, user_symbols)
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)  # type: ignore[attr-defined]
    normal = proto.SentencePiece.NORMAL
    pieces = [one.piece for one in proto.pieces if one.type == normal]
    others = [one for one in proto.pieces if one.type != normal]  # special ids, user symbols and bytes
    merges = _parts_of_merges([piece for piece in pieces if len(piece) > 1])
    casings = _count_casings(words.counts, folded, Tokenizer(model), merges)
    learned = {piece for piece in pieces if len(piece) == 1}
    characters = sorted({one for one in words.characters() if _fold(one) in learned} | learned)
    if byte_fallback:
        counts = words.character_counts(user_symbols)
        characters = [one for one in characters if one in learned or counts.get(one, 0) >= MIN_CHARACTER_COUNT]
    room = vocabulary_size - len(others) - len(characters)
    if room < 0:
        raise InputError(
            f"corpus.vocabulary_size: {vocabulary_size} is too small for the {len(characters)} distinct characters of"
            f" the text and its casings; set at least {vocabulary_size - room}, or lower corpus.character_coverage"
        )
    chosen = _frequent(casings, merges, rarest)
    if len(chosen) < room:
        raise InputError(
            f"corpus.vocabulary_size: {vocabulary_size} pieces are more than the training text allows;"
            f" the largest that works is {vocabulary_size - room + len(chosen)}"
        )
    del proto.pieces[:]
    proto.pieces.extend(others)
    # The score is the merge's priority. Characters have one too, without effect.
    for rank, piece in enumerate(chosen[:room] + characters):
        proto.pieces.add(piece=piece, score=-float(rank))
    proto.trainer_spec.vocab_size = len(proto.pieces)
    return proto.SerializeToString(deterministic=True)


def casing_groups(
    pieces: Sequence[str], user_symbols: Iterable[str] = ()
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return which pieces are casings of the same one, and the casing of each.

    Args:
        pieces: the vocabulary in the order of its ids.
        user_symbols: like special ids and bytes, they have no casings.

    Returns:
        For each piece the number of its group, and of its casing, int64 [V] and int64 [V]. Groups are numbered from 0
        on in the order of their first pieces.
    """
    alone = {*pieces[:NUM_SPECIAL_IDS], *BYTE_NAMES, *user_symbols}
    numbers: dict[tuple[str, bool], int] = {}
    groups, casings = [], []
    for piece in pieces:
        key = (piece, True) if piece in alone else (piece.lower(), False)
        groups.append(numbers.setdefault(key, len(numbers)))
        casings.append(_LOWER if piece in alone else _casing_of(piece))
    return np.array(groups, dtype=np.int64), np.array(casings, dtype=np.int64)


def _casing_of(piece: str) -> int:
    """Return the casing. A single capital has a kind of its own, since it may be title case or upper case."""
    letters = [one for one in piece if one.lower() != one.upper()]
    capitals = [one != one.lower() for one in letters]
    if not any(capitals):
        return _LOWER
    if len(capitals) == 1:
        return _CAPITAL
    if all(capitals):
        return _UPPER
    return _TITLE if capitals[0] and not any(capitals[1:]) else _MIXED


def _fold(text: str, symbols: Sequence[str] = ()) -> str:
    """Return the text in lower case, with as many characters; user symbols keep their case."""
    if symbols and any(symbol in text for symbol in symbols):
        longest_first = sorted(symbols, key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)
        return "".join(part if i % 2 else _fold(part) for i, part in enumerate(parts))
    lower = text.lower()
    # Some characters, such as U+0130, have two in lower case.
    return lower if len(lower) == len(text) else "".join(c.lower() if len(c.lower()) == 1 else c for c in text)


def _count_casings(
    words: Mapping[str, int], folded: Sequence[str], tokenizer: Tokenizer, merges: Mapping[str, list[tuple[int, int]]]
) -> dict[str, Counter[str]]:
    """Return, for each merge, how often its result occurs in which casing, also as part of a longer piece."""
    names = tokenizer.pieces()
    casings: dict[str, Counter[str]] = {merge: Counter() for merge in merges}
    last: Counter[tuple[str, str]] = Counter()
    cased_words = iter(words.items())
    for begin in range(0, len(folded), _CHUNK_WORDS):
        ids_of_words = tokenizer.encode(list(folded[begin : begin + _CHUNK_WORDS]), num_threads=os.cpu_count() or 1)
        for ids, (word, count) in zip(ids_of_words, cased_words, strict=False):
            pieces, text, start = [names[i] for i in ids], _SPACE + word, 0
            if sum(map(len, pieces)) != len(text):
                continue  # Bytes, whose names are longer than what they stand for.
            for piece in pieces:
                last[piece, text[start : start + len(piece)]] += count
                start += len(piece)
    for (piece, cased), count in last.items():
        for start, end in merges.get(piece, ()):
            casings[piece[start:end]][cased[start:end]] += count
    return casings


def _frequent(
    casings: Mapping[str, Counter[str]], merges: Mapping[str, list[tuple[int, int]]], rarest: float
) -> list[str]:
    """Return the casings of all merges, but for rare ones that no frequent one consists of, in the merges' order."""
    needed = {
        cased[start:end]
        for merge, counts in casings.items()
        for cased, count in counts.items()
        if count >= rarest * counts.total()
        for start, end in merges[merge]
    }
    return [
        cased
        for counts in casings.values()
        for cased, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        if cased in needed
    ]


def _parts_of_merges(merges: Sequence[str]) -> dict[str, list[tuple[int, int]]]:
    """Return, for each merge in the given order, all merges that it is made of, itself included, as slices of it."""
    ranks = {piece: rank for rank, piece in enumerate(merges)}
    parts: dict[str, list[tuple[int, int]]] = {}
    for piece, rank in ranks.items():
        cut = _last_cut(piece, ranks, rank)
        left, right = parts.get(piece[:cut], []), parts.get(piece[cut:], [])
        parts[piece] = [(0, len(piece)), *left, *((start + cut, end + cut) for start, end in right)]
    return parts


def _last_cut(piece: str, ranks: Mapping[str, int], rank: int) -> int:
    """Return where the two parts meet that the merge of this rank joins to the piece."""
    parts = list(piece)
    while len(parts) > 2:
        joined = [ranks.get(one + other, rank) for one, other in itertools.pairwise(parts)]
        best = joined.index(min(joined))
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return len(parts[0])
