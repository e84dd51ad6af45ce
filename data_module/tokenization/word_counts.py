"""What a text's words are: its white space made regular, and its words and characters counted."""

from collections import Counter

import numpy as np

# Everything that some program takes for the end of a line or a column, NUL, U+001F, which sentencepiece learns no
# piece for, and U+2581, which is how it writes a space. White space that is only a width, such as U+00A0, is text.
_SPACE_LIKE = "\0\t\r\v\f\x1c\x1d\x1e\x1f\x85\u2028\u2029\u2581"
# Training takes about 0.7 kB for each distinct word; past this many the rarest are forgotten.
_MAX_COUNTED_WORDS = 2_000_000


def normalize_white_space(lines: str) -> str:
    r"""Return the "\n"-separated lines with every run of white space one space, and none at a line's ends.

    Tabs, NUL, U+001F, U+2581 and all the line ends of Unicode but "\n" count as white space. Works on many lines at
    once, because whole-text replacements are a hundred times faster than a call for each line.
    """
    for character in _SPACE_LIKE:
        lines = lines.replace(character, " ")
    while "  " in lines:
        lines = lines.replace("  ", " ")
    return lines.replace("\n ", "\n").replace(" \n", "\n").strip(" ")


class WordCounts:
    """How often each word of a text occurs: all that byte-pair encoding needs to know of it.

    Pieces never cross a space, so that training on words and their counts gives the same pieces as training
    on the sentences, in a fraction of the memory and time.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._seen = np.zeros(0x110000, dtype=bool)

    def add(self, lines: str, times: int = 1) -> None:
        r"""Count the words of normalized "\n"-separated lines, as if they were there `times` times."""
        words = lines.replace("\n", " ").split(" ")
        for _ in range(times):
            self.counts.update(words)
        rarest = 1
        while len(self.counts) > _MAX_COUNTED_WORDS:
            self.counts = Counter({word: n for word, n in self.counts.items() if n > rarest})
            rarest *= 2

    def add_characters(self, lines: str) -> None:
        """Take note of characters that the vocabulary must have, though their words are not counted."""
        self._seen[np.frombuffer(lines.encode("utf-32-le"), dtype=np.uint32)] = True

    def characters(self) -> str:
        """Return every character that was seen, in code-point order, white space left out."""
        seen = "".join(map(chr, np.flatnonzero(self._seen)))
        return normalize_white_space(seen).replace(" ", "").replace("\n", "")
