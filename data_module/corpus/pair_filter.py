"""Which pairs a corpus keeps, and an account of every one that it drops."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import Any

import numpy as np

from data_module.readers.pairs import PairChunk
from data_module.settings import CorpusSettings

_LINES_NAMED = 5


class Reason(StrEnum):
    """Why a pair was dropped. One that has several reasons counts under the first in this order."""

    INVALID_UTF8 = "invalid_utf8"
    EMPTY = "empty_side"
    TOO_LONG = "too_long"
    LENGTH_RATIO = "length_ratio"
    IN_VALIDATION = "overlap_with_validation"
    IN_TEST = "overlap_with_test"
    DUPLICATE = "duplicate"


@dataclass
class PairAccount:
    """Counts the pairs of a split: read is always kept and dropped together."""

    read: int = 0
    kept: int = 0
    also_in_validation: int = 0
    """Pairs that also occur in the validation text, dropped or not."""
    also_in_test: int = 0
    """Pairs that also occur in the test text, dropped or not."""
    dropped: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(Reason, 0))
    lines: dict[Reason, list[str]] = field(default_factory=lambda: {reason: [] for reason in Reason})

    def drop(self, reason: Reason, chunk: PairChunk, pairs: np.ndarray, repeat: int) -> None:
        """Count the chunk's `pairs`, indices, as dropped from a source that is read `repeat` times."""
        self.dropped[reason] += len(pairs) * repeat
        room = _LINES_NAMED - len(self.lines[reason])
        self.lines[reason] += [f"{chunk.name}:{chunk.first_line + i}" for i in pairs[:room].tolist()]

    def as_dict(self) -> dict[str, Any]:
        """Return the account as the manifest shows it, with the first few lines that each reason dropped."""
        return {
            "pairs_read": self.read,
            "pairs_kept": self.kept,
            "pairs_dropped": {
                str(reason): {"pairs": count, "first_lines": self.lines[reason]}
                for reason, count in self.dropped.items()
            },
            "pairs_also_in_validation": self.also_in_validation,
            "pairs_also_in_test": self.also_in_test,
        }


class SeenPairs:
    """Remembers the pairs of a corpus by 64-bit hashes: 8 bytes a pair, and twice that while it merges.

    Two different pairs of 40 million are taken for one with a chance of 1 in 20,000.
    """

    def __init__(self) -> None:
        self._runs: list[np.ndarray] = []

    def add(self, hashes: np.ndarray) -> np.ndarray:
        """Remember the hashes; return for each whether it was there before, also in the same call."""
        new = np.zeros(len(hashes), dtype=bool)
        new[np.unique(hashes, return_index=True)[1]] = True
        for run in self._runs:
            place = np.minimum(np.searchsorted(run, hashes), len(run) - 1)
            new &= run[place] != hashes
        if new.any():
            self._runs.append(np.sort(hashes[new]))
        # Sorted runs of at least doubling sizes: few to search, and each hash is merged a few times only.
        while len(self._runs) > 1 and 2 * len(self._runs[-1]) > len(self._runs[-2]):
            self._runs[-2:] = [np.sort(np.concatenate(self._runs[-2:]), kind="stable")]
        return ~new


def hash_pairs(pairs: Iterable[tuple[str, str]]) -> np.ndarray:
    """Return a uint64 for each pair, the same on every machine."""
    digests = (blake2b(f"{source}\t{target}".encode(), digest_size=8).digest() for source, target in pairs)
    return np.frombuffer(b"".join(digests), dtype="<u8")


@dataclass(frozen=True)
class HeldOutPairs:
    """What training text is compared with.

    Only a pair that occurs as a whole counts, white space aside: then the network was shown the answer. A source
    sentence alone may well recur in other text with a translation of its own ("Thank you.").
    """

    validation: set[tuple[str, str]]
    test: set[tuple[str, str]]


class PairFilter:
    """Decides on one split's pairs, in the order in which they are read."""

    def __init__(self, settings: CorpusSettings, held_out: HeldOutPairs | None = None) -> None:
        """Take the pairs to compare with; None filters the validation split itself.

        From validation, whose figures must not depend on how training text is cleaned, go only pairs that
        are unreadable, empty or longer than the network may be given.
        """
        self.account = PairAccount()
        self._settings = settings
        self._held_out = held_out
        self._seen = SeenPairs()

    def keep(self, chunk: PairChunk, source_lengths: np.ndarray, target_lengths: np.ndarray, repeat: int) -> np.ndarray:
        """Return the indices of the pairs to keep, and account for all, `repeat` times; lengths in pieces."""
        settings, account = self._settings, self.account
        num_pairs = len(chunk.source)
        left = np.ones(num_pairs, dtype=bool)

        def drop(reason: Reason, unwanted: np.ndarray) -> None:
            account.drop(reason, chunk, np.flatnonzero(left & unwanted), repeat)
            left[unwanted] = False

        shorter = np.minimum(source_lengths, target_lengths)
        longer = np.maximum(source_lengths, target_lengths)
        drop(Reason.INVALID_UTF8, _mask(num_pairs, chunk.invalid))
        drop(Reason.EMPTY, shorter == 0)
        drop(Reason.TOO_LONG, longer > settings.max_tokens)
        if self._held_out is not None:
            if settings.max_length_ratio is not None:
                drop(Reason.LENGTH_RATIO, longer > settings.max_length_ratio * shorter)
            in_validation = left & _occur(chunk, self._held_out.validation)
            in_test = left & _occur(chunk, self._held_out.test)
            account.also_in_validation += int(in_validation.sum()) * repeat
            account.also_in_test += int(in_test.sum()) * repeat
            if settings.drop_overlap:
                drop(Reason.IN_VALIDATION, in_validation)
                drop(Reason.IN_TEST, in_test)
            if settings.drop_duplicates:
                candidates = np.flatnonzero(left)
                hashes = hash_pairs((chunk.source[i], chunk.target[i]) for i in candidates.tolist())
                drop(Reason.DUPLICATE, _mask(num_pairs, candidates[self._seen.add(hashes)]))
        kept = np.flatnonzero(left)
        account.read += num_pairs * repeat
        account.kept += len(kept) * repeat
        return kept


def _occur(chunk: PairChunk, held_out: set[tuple[str, str]]) -> np.ndarray:
    """Return for each pair whether it is one of those held out."""
    if not held_out or held_out.isdisjoint(zip(chunk.source, chunk.target, strict=True)):
        return np.zeros(len(chunk.source), dtype=bool)
    pairs = zip(chunk.source, chunk.target, strict=True)
    return np.fromiter((pair in held_out for pair in pairs), dtype=bool, count=len(chunk.source))


def _mask(length: int, indices: list[int] | np.ndarray) -> np.ndarray:
    mask = np.zeros(length, dtype=bool)
    mask[indices] = True
    return mask
