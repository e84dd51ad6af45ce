"""White-space normalization, and counts of a text's words and characters."""

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

SPACE_MARK = "\u2581"
"""What sentencepiece represents a space by. Text that contains it gets a space in its place."""
# All characters that some program treats as the end of a line or column; NUL; U+001F, which sentencepiece does not
# learn; and its mark of a space. Other white space, such as U+00A0, is part of the text.
SPACE_LIKE = "\0\t\r\v\f\x1c\x1d\x1e\x1f\x85\u2028\u2029" + SPACE_MARK
# Training takes about 0.7 kB per distinct word. Beyond this number, the rarest words are dropped.
_MAX_COUNTED_WORDS = 2_000_000
_CHUNK_WORDS = 100_000


def normalize_white_space(lines: str) -> str:
    r"""Replace every run of white space in "\n"-separated lines by one space, and strip the lines.

    Tabs, NUL, U+001F, U+2581 and all line ends of Unicode except "\n" count as white space. The function takes many
    lines at once, which is a hundred times faster than a call per line.
    """
    for character in SPACE_LIKE:
        lines = lines.replace(character, " ")
    while "  " in lines:
        lines = lines.replace("  ", " ")
    return lines.replace("\n ", "\n").replace(" \n", "\n").strip(" ")


class WordCounts:
    """The number of occurrences of each word of a text, from which byte-pair encoding is trained.

    Pieces never cross a space, so training on word counts gives the same pieces as training on the sentences, in a
    fraction of the memory and time.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._seen = np.zeros(0x110000, dtype=bool)

    def add(self, lines: str, times: int = 1) -> None:
        r"""Count the words of normalized "\n"-separated lines `times` times."""
        words = lines.replace("\n", " ").split(" ")
        for _ in range(times):
            self.counts.update(words)
        rarest = 1
        while len(self.counts) > _MAX_COUNTED_WORDS:
            self.counts = Counter({word: n for word, n in self.counts.items() if n > rarest})
            rarest *= 2

    def add_characters(self, lines: str) -> None:
        """Add characters to the required vocabulary without counting their words."""
        self._seen[np.frombuffer(lines.encode("utf-32-le"), dtype=np.uint32)] = True

    def characters(self) -> str:
        """Return all added characters except white space, in code-point order."""
        seen = "".join(map(chr, np.flatnonzero(self._seen)))
        return normalize_white_space(seen).replace(" ", "").replace("\n", "")

    def character_counts(self, without: Sequence[str] = ()) -> dict[str, int]:
        """Return how often each character occurs in the counted words, outside the strings `without`."""
        # Of two strings that begin alike, the longer one is found first.
        left_out = re.compile("|".join(map(re.escape, sorted(without, key=len, reverse=True))) or r"(?!)")
        words, counts = list(self.counts), np.fromiter(self.counts.values(), dtype=np.int64)
        totals = np.zeros(0x110000, dtype=np.int64)
        for start in range(0, len(words), _CHUNK_WORDS):
            chunk = left_out.sub("", "\n".join(words[start : start + _CHUNK_WORDS])).split("\n")
            times = np.repeat(counts[start : start + _CHUNK_WORDS], list(map(len, chunk)))
            codes = np.frombuffer("".join(chunk).encode("utf-32-le"), dtype=np.uint32)
            np.add.at(totals, codes, times)
        return {chr(code): int(totals[code]) for code in np.flatnonzero(totals)}
