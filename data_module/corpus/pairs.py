"""The pairs of a corpus: read from any source as clean sentences and filtered, with an account of dropped pairs."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import numpy as np

from data_module.corpus.dataset_reader import HubDataset
from data_module.corpus.manifest import PairCounts, SourceFile
from data_module.corpus.readers import READERS, PairedFiles, Reader, TsvFile
from data_module.errors import InputError
from data_module.settings import CorpusSettings, TextSource
from data_module.system.files import open_regular
from data_module.system.text_files import BYTE_ORDER_MARK, StrayMarks, read_errors
from data_module.tokenization.tokenizer import LONGEST_TOKEN, MAX_PIECE_CHARACTERS, clean_lines

_BUILT_IN: dict[str, type[Reader]] = {"source": PairedFiles, "tsv": TsvFile, "dataset": HubDataset}
"""Readers by the key of a text source that selects them."""
_MAX_LINES = 5


@dataclass(frozen=True)
class PairChunk:
    """Successive pairs of one source.

    White space is normalized. A sentence of invalid UTF-8 or without a visible character is empty. Source sentences
    that are not empty begin with the prefix of the text source, if it has one.
    """

    names: tuple[str, str]
    """The files or data sets of source and target that line numbers refer to."""
    first_line: int
    source: list[str]
    target: list[str]
    invalid: list[int]
    """Indices into the chunk of pairs with invalid UTF-8."""


def open_reader(text: TextSource, settings: CorpusSettings) -> Reader:
    """Return the reader of a text source; raise InputError if no reader of that name is registered."""
    languages = (text.source_language or settings.source_language, text.target_language or settings.target_language)
    if text.reader is None:
        return next(kind for key, kind in _BUILT_IN.items() if getattr(text, key))(text, languages)
    if text.reader not in READERS:
        raise InputError(READERS.unknown(text.reader))
    return READERS[text.reader](text, languages)


def all_available(settings: CorpusSettings) -> bool:
    """Return whether all text of a corpus can be read here: its readers are registered, and no network is needed."""
    return all(
        (text.reader is None or text.reader in READERS) and open_reader(text, settings).is_available()
        for text in settings.texts()
    )


def fingerprint(name: str, path: Path) -> SourceFile:
    """Return a file's name, size in bytes and SHA-256."""
    with read_errors(name), open_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"file": name, "bytes": file.tell(), "sha256": digest}


def read_pairs(
    text: TextSource, settings: CorpusSettings, marks: tuple[StrayMarks, StrayMarks] | None = None
) -> Iterator[PairChunk]:
    """Read a source once, about a megabyte at a time, and add the stray marks of both sides to `marks`.

    Raises InputError as `Reader.chunks` does, or if there is no text, or a line is invalid UTF-8 and
    `corpus.drop_invalid_utf8` is false.
    """
    reader = open_reader(text, settings)
    first_line = 1
    for sides in reader.chunks():
        if not any(sides):
            continue
        decoded: list[list[str]] = []
        invalid: set[int] = set()
        for side, (name, lines) in enumerate(zip(reader.names, sides, strict=True)):
            if first_line == 1:
                lines[0] = lines[0].removeprefix(BYTE_ORDER_MARK)
            if marks is not None:
                marks[side].add(first_line, lines)
            sentences, undecodable = _decode(lines)
            if len(sentences) != len(sides[0]):
                raise InputError(
                    f"{name}:{first_line}: the reader returned {len(sides[0])} source lines and {len(sentences)}"
                    r' lines that end in "\n"; correct its `chunks` (see `as_lines`)'
                )
            if undecodable and not settings.drop_invalid_utf8:
                raise invalid_utf8(name, first_line + undecodable[0])
            decoded.append(sentences)
            invalid.update(undecodable)
        yield with_prefix(PairChunk(reader.names, first_line, decoded[0], decoded[1], sorted(invalid)), text.prefix)
        first_line += len(decoded[0])
    if first_line == 1:
        raise InputError(f"{reader.names[0]}: has no text; name a source with text")


def with_prefix(chunk: PairChunk, prefix: str | None) -> PairChunk:
    """Add the prefix of the text source to a chunk that was read without it."""
    if prefix is None:
        return chunk
    return replace(chunk, source=[f"{prefix} {sentence}" if sentence else "" for sentence in chunk.source])


def invalid_utf8(name: str, line: int) -> InputError:
    """Return the error for a line that is not UTF-8."""
    return InputError(
        f"{name}:{line}: invalid UTF-8; correct the line, or set `corpus.drop_invalid_utf8: true` to drop such pairs;"
        " if the whole file is Latin-1, convert it (iconv -f LATIN1 -t UTF-8)"
    )


def _decode(lines: list[bytes]) -> tuple[list[str], list[int]]:
    """Return the lines as normalized text, and the indices of those with invalid UTF-8, which are left empty."""
    invalid = []
    try:
        text = b"".join(lines).decode()
    except UnicodeDecodeError:
        decoded = []
        for i, line in enumerate(lines):
            try:
                decoded.append(line.decode())
            except UnicodeDecodeError:
                decoded.append("\n")
                invalid.append(i)
        text = "".join(decoded)
    return clean_lines(text.removesuffix("\n")), invalid


def max_characters(settings: CorpusSettings) -> int:
    """Return the number of characters above which a sentence has too many pieces, whatever the tokenizer."""
    longest_piece = LONGEST_TOKEN if settings.model_type == "word" else MAX_PIECE_CHARACTERS
    return settings.max_tokens * max(longest_piece, *map(len, settings.user_symbols), 0)


def least_lengths(sentences: list[str], settings: CorpusSettings) -> np.ndarray:
    """Return a lower bound on each sentence's number of pieces, int64 [sentences]: a word is one piece or more.

    Only with `corpus.model_type: word`, several are one piece if they are unknown. The bound is more than `max_tokens`
    for a sentence with more words, or with more than `max_characters`.
    """
    characters = np.array(list(map(len, sentences)), dtype=np.int64)
    lengths = (characters > 0).astype(np.int64)
    # A shorter sentence has too few spaces to have too many words.
    fewest = np.inf if settings.model_type == "word" else 2 * settings.max_tokens
    for place in np.flatnonzero(characters > fewest).tolist():
        lengths[place] = sentences[place].count(" ") + 1
    lengths[characters > max_characters(settings)] = settings.max_tokens + 1
    return lengths


class Reason(StrEnum):
    """Why a pair was dropped. A pair with several reasons counts under the first in this order."""

    INVALID_UTF8 = "invalid_utf8"
    EMPTY = "empty_side"
    TOO_LONG = "too_long"
    LENGTH_RATIO = "length_ratio"
    IN_VALIDATION = "overlap_with_validation"
    IN_TEST = "overlap_with_test"
    DUPLICATE = "duplicate"


ALSO_IN: dict[str, Literal["pairs_also_in_validation", "pairs_also_in_test"]] = {
    "validation": "pairs_also_in_validation",
    "test": "pairs_also_in_test",
}
"""Held-out split -> its key in the counts of the pairs, dropped or not, that occur in its text too."""


class SeenPairs:
    """A set of pairs, stored as 64-bit hashes: 8 bytes per pair, and twice that during a merge.

    The probability that any two different pairs of 40 million have the same hash is 1 in 20,000.
    """

    def __init__(self) -> None:
        self._runs: list[np.ndarray] = []

    def add(self, hashes: np.ndarray) -> np.ndarray:
        """Add hashes; return for each whether it was in the set, or occurs earlier in the same call."""
        new = np.zeros(len(hashes), dtype=bool)
        new[np.unique(hashes, return_index=True)[1]] = True
        for run in self._runs:
            index = np.minimum(np.searchsorted(run, hashes), len(run) - 1)
            new &= run[index] != hashes
        if new.any():
            self._runs.append(np.sort(hashes[new]))
        # Each run is at least twice as large as the next, so there are few runs, and each hash is merged few times.
        while len(self._runs) > 1 and 2 * len(self._runs[-1]) > len(self._runs[-2]):
            self._runs[-2:] = [np.sort(np.concatenate(self._runs[-2:]), kind="stable")]
        return ~new


def hash_pairs(pairs: Iterable[tuple[str, str]]) -> np.ndarray:
    """Return a uint64 hash of each pair, the same on every machine."""
    digests = (blake2b(f"{source}\t{target}".encode(), digest_size=8).digest() for source, target in pairs)
    return np.frombuffer(b"".join(digests), dtype="<u8")


class PairFilter:
    """Filters the pairs of one split, in the order in which they are read, and counts them."""

    def __init__(self, settings: CorpusSettings, held_out: dict[str, set[tuple[str, str]]] | None = None) -> None:
        """Create a filter.

        Args:
            settings: the recipe's `corpus:` section.
            held_out: the pairs of "validation" and of "test" to compare with, whole pairs with white space normalized:
                a source sentence alone may recur with another translation ("Thank you."). None for the validation
                split itself, from which only pairs are dropped that are invalid UTF-8, empty or too long, so that its
                scores do not depend on the other settings.
        """
        self.counts: PairCounts = {
            "pairs_read": 0,
            "pairs_kept": 0,
            "pairs_dropped": {str(reason): {"pairs": 0, "first_lines": []} for reason in Reason},
            "pairs_also_in_validation": 0,
            "pairs_also_in_test": 0,
        }
        """As in the manifest. The pairs read are always the sum of those kept and all those dropped."""
        self._settings = settings
        self._held_out = held_out
        self._seen = SeenPairs()

    def keep(self, chunk: PairChunk, source_lengths: np.ndarray, target_lengths: np.ndarray, repeat: int) -> np.ndarray:
        """Return the indices of the pairs to keep, and count all pairs `repeat` times. Lengths are in pieces."""
        settings, counts = self._settings, self.counts
        num_pairs = len(chunk.source)
        numbers, left = np.arange(num_pairs), np.ones(num_pairs, dtype=bool)

        def drop(reason: Reason, unwanted: np.ndarray) -> None:
            pairs, entry = np.flatnonzero(left & unwanted), counts["pairs_dropped"][reason]
            entry["pairs"] += len(pairs) * repeat
            for i in pairs[: _MAX_LINES - len(entry["first_lines"])].tolist():
                only_target_is_empty = bool(chunk.source[i]) and not chunk.target[i]
                entry["first_lines"].append(f"{chunk.names[only_target_is_empty]}:{chunk.first_line + i}")
            left[unwanted] = False

        shorter = np.minimum(source_lengths, target_lengths)
        longer = np.maximum(source_lengths, target_lengths)
        drop(Reason.INVALID_UTF8, np.isin(numbers, chunk.invalid))
        drop(Reason.EMPTY, shorter == 0)
        drop(Reason.TOO_LONG, longer > settings.max_tokens)
        if self._held_out is not None:
            if settings.max_length_ratio is not None:
                drop(Reason.LENGTH_RATIO, longer > settings.max_length_ratio * shorter)
            also_in = {split: left & _occur(chunk, pairs) for split, pairs in self._held_out.items()}
            for split, found in also_in.items():
                counts[ALSO_IN[split]] += int(found.sum()) * repeat
                if settings.drop_overlap:
                    drop(Reason(f"overlap_with_{split}"), found)
            if settings.drop_duplicates:
                candidates = np.flatnonzero(left)
                hashes = hash_pairs((chunk.source[i], chunk.target[i]) for i in candidates.tolist())
                drop(Reason.DUPLICATE, np.isin(numbers, candidates[self._seen.add(hashes)]))
        kept = np.flatnonzero(left)
        counts["pairs_read"] += num_pairs * repeat
        counts["pairs_kept"] += len(kept) * repeat
        return kept

    def check_not_empty(self, split: str) -> None:
        """Raise InputError if no pair is left of a split."""
        if not self.counts["pairs_kept"]:
            dropped = {reason: entry["pairs"] for reason, entry in self.counts["pairs_dropped"].items()}
            reasons = ", ".join(f"{reason}: {pairs}" for reason, pairs in dropped.items() if pairs)
            raise InputError(f"corpus.{split}: no pair is left ({reasons}); correct the text or relax the settings")


def _occur(chunk: PairChunk, held_out: set[tuple[str, str]]) -> np.ndarray:
    """Return for each pair whether it is held out."""
    if not held_out or held_out.isdisjoint(zip(chunk.source, chunk.target, strict=True)):
        return np.zeros(len(chunk.source), dtype=bool)
    pairs = zip(chunk.source, chunk.target, strict=True)
    return np.fromiter((pair in held_out for pair in pairs), dtype=bool, count=len(chunk.source))
