"""Filter the pairs of a corpus, and account for every dropped pair."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import Any

import numpy as np

from data_module.readers.pairs import PairChunk
from data_module.settings import CorpusSettings

_MAX_LINES = 5


class Reason(StrEnum):
    """Why a pair was dropped. A pair with several reasons counts under the first in this order."""

    INVALID_UTF8 = "invalid_utf8"
    EMPTY = "empty_side"
    TOO_LONG = "too_long"
    LENGTH_RATIO = "length_ratio"
    IN_VALIDATION = "overlap_with_validation"
    IN_TEST = "overlap_with_test"
    DUPLICATE = "duplicate"


@dataclass
class PairAccount:
    """Counts the pairs of a split. `read` is always the sum of `kept` and all `dropped`."""

    read: int = 0
    kept: int = 0
    also_in_validation: int = 0
    """Number of pairs that also occur in the validation text, dropped or not."""
    also_in_test: int = 0
    """Number of pairs that also occur in the test text, dropped or not."""
    dropped: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(Reason, 0))
    lines: dict[Reason, list[str]] = field(default_factory=lambda: {reason: [] for reason in Reason})

    def drop(self, reason: Reason, chunk: PairChunk, pairs: np.ndarray, repeat: int) -> None:
        """Count the pairs with the indices `pairs` of a chunk as dropped, `repeat` times."""
        self.dropped[reason] += len(pairs) * repeat
        room = _MAX_LINES - len(self.lines[reason])
        self.lines[reason] += [f"{chunk.name}:{chunk.first_line + i}" for i in pairs[:room].tolist()]

    def as_dict(self) -> dict[str, Any]:
        """Return the account as in the manifest, with the first few lines that were dropped for each reason."""
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


@dataclass(frozen=True)
class HeldOutPairs:
    """The pairs that training text is compared with.

    Only whole pairs are compared, with white space normalized. A source sentence alone may legitimately recur with
    another translation ("Thank you.").
    """

    validation: set[tuple[str, str]]
    test: set[tuple[str, str]]


class PairFilter:
    """Filters the pairs of one split, in the order in which they are read."""

    def __init__(self, settings: CorpusSettings, held_out: HeldOutPairs | None = None) -> None:
        """Create a filter.

        Args:
            settings: the recipe's `corpus:` section.
            held_out: the pairs to compare with; None for the validation split itself. From validation, only pairs are
                dropped that are invalid UTF-8, empty or too long, so that its scores do not depend on the other
                settings.
        """
        self.account = PairAccount()
        self._settings = settings
        self._held_out = held_out
        self._seen = SeenPairs()

    def keep(self, chunk: PairChunk, source_lengths: np.ndarray, target_lengths: np.ndarray, repeat: int) -> np.ndarray:
        """Return the indices of the pairs to keep, and count all pairs `repeat` times. Lengths are in pieces."""
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
    """Return for each pair whether it is held out."""
    if not held_out or held_out.isdisjoint(zip(chunk.source, chunk.target, strict=True)):
        return np.zeros(len(chunk.source), dtype=bool)
    pairs = zip(chunk.source, chunk.target, strict=True)
    return np.fromiter((pair in held_out for pair in pairs), dtype=bool, count=len(chunk.source))


def _mask(length: int, indices: list[int] | np.ndarray) -> np.ndarray:
    mask = np.zeros(length, dtype=bool)
    mask[indices] = True
    return mask
