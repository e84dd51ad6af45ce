"""The form of training text: spaces, lengths of words, words in parts (`@@ `) and tags; and what differs from it.

A model reads tokens in another form than its training text's without an error, and answers badly.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

from data_module.system.files import PlainValues

SIDE_SHAPE = dict.fromkeys(("lines_with_spaces", "characters_per_word", "lines_with_parts"), (int, float))
SHAPE = {side: {**SIDE_SHAPE, "tags": [str]} for side in ("source", "target")}
"""Types of the values that `TextForm.values` returns; see `misshapen`."""
_PART = re.compile(r"\S@@ ")
_TAG = re.compile(r"[^\w\s]\S*\w\S*[^\w\s]|_\S*[^\W_]\S*_")
_MAX_TAGS = 64
_FACTOR = 3
"""Ratio of lengths of words above which text is split in another way: languages and kinds of text differ by less."""
_SYMBOLS = 3
"""Mean number of characters of words, below which they are letters or other symbols; addresses are long anyway."""
_RARE, _USUAL = 0.01, 0.7
"""Shares of lines: what fewer have is strange, and so is the lack of what more have."""
ENOUGH = 20
"""Number of words in lines of another form that are no coincidence, where these lines are most of the text."""
_LONGEST_WORD = 7
"""Number of words that one long word counts for at most: a single one, or two, are no evidence."""


class Difference(NamedTuple):
    """How a line differs from the training text of its side."""

    is_target: bool
    text: str = ""
    """What differs; empty if nothing does."""
    weight: int = 0
    """Number of words of evidence."""


class SideForm:
    """Counts the form of one side's lines."""

    def __init__(self) -> None:
        self._lines = self._spaced = self._words = self._characters = self._in_parts = 0
        self._first: set[str] | None = set()

    def add(self, lines: list[str]) -> None:
        """Count lines that `clean_lines` has returned, none of them empty."""
        text = "\n".join(lines)
        num_spaces = text.count(" ")
        self._lines += len(lines)
        self._spaced += sum(" " in line for line in lines)
        self._words += num_spaces + len(lines)
        self._characters += len(text) - num_spaces - max(0, len(lines) - 1)
        self._in_parts += sum(bool(_PART.search(line)) for line in lines) if "@@ " in text else 0
        if self._first is not None:
            self._first |= {line.partition(" ")[0] if " " in line else "" for line in lines}
            if len(self._first) > _MAX_TAGS:
                self._first = None

    def values(self) -> PlainValues:
        """Return what is stored: shares of lines, the mean length of a word, and tags, one of which begins every line.

        A single first word of all lines is a tag; several are tags only if each is in brackets or the like.
        """
        tags = sorted(self._first or ()) if self._lines >= ENOUGH else []
        is_tagged = "" not in tags and (len(tags) == 1 or all(map(_TAG.fullmatch, tags)))
        return {
            "lines_with_spaces": round(self._spaced / max(1, self._lines), 4),
            "characters_per_word": round(self._characters / max(1, self._words), 4),
            "lines_with_parts": round(self._in_parts / max(1, self._lines), 4),
            "tags": tags if is_tagged else [],
        }


def form_notes(form: PlainValues) -> Iterable[str]:
    """Yield a line for each likely mistake in the form of training text."""
    for side, values in form.items():
        if values["lines_with_parts"] > _RARE:
            share = f"{values['lines_with_parts']:.0%} of its {side} lines"
            yield (
                f"corpus.train: {share} have words in parts (@@), which other text has not; join them (sed 's/@@ //g'):"
                " the tokenizer splits words itself"
            )
    if (tags := form["target"]["tags"]) and not form["source"]["tags"] and all(map(_TAG.fullmatch, tags)):
        yield (
            f"corpus.train: {tags[0]} or the like begins each target line and no source line: if it tells the model"
            " what to write, source and target are exchanged"
        )


def difference(form: PlainValues, is_target: bool, line: str, has_prefixes: bool = False) -> Difference | None:
    """Compare a line with the form of a side's training text; None for an empty line.

    With `has_prefixes`, a tag that is missing is reported elsewhere.
    """
    words = line.split()
    if not words:
        return None
    side = form["target" if is_target else "source"]
    length, usual = sum(map(len, words)) / len(words), side["characters_per_word"]
    in_parts, weight, text = bool(_PART.search(line)), len(words), ""
    if in_parts and side["lines_with_parts"] < _RARE:
        text = "words in parts (@@), which training text did not have; join them (sed 's/@@ //g')"
    elif side["lines_with_parts"] > _USUAL and not in_parts:
        text = "no words in parts (@@), which training text had; split words as there, or train on whole words"
    elif len(words) > 1 and (side["lines_with_spaces"] < _RARE or length * _FACTOR < usual):
        text = "spaces where training text had none; write text as the training text is written"
    elif length > _FACTOR * usual and usual < _SYMBOLS and side["lines_with_spaces"] > _USUAL:
        text = "no spaces where training text had them; write text as the training text is written"
        weight = min(_LONGEST_WORD, round(length / usual)) * len(words)
    elif side["tags"] and words[0] not in side["tags"] and not has_prefixes:
        text = f"without a first word that each training line had ({' '.join(side['tags'][:3])})"
    return Difference(is_target, text, weight if text else 0)
