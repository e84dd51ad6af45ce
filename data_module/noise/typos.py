"""Typing errors: neighbouring letters swapped, a letter left out, a letter doubled, or the key beside it hit."""

import re
import unicodedata

from numpy.random import Generator

TYPO_RATE = 1 / 6
"""Probability that a word of `MIN_LETTERS` letters or more is misspelled."""
MIN_LETTERS = 4
_LAYOUTS = (
    ("qwertyuiop", "asdfghjkl", "zxcvbnm"),
    ("qwertzuiop", "asdfghjkl", "yxcvbnm"),
    ("azertyuiop", "qsdfghjklm", "wxcvbn"),
)
"""The rows of letters of QWERTY, QWERTZ and AZERTY keyboards."""
MARKS = "".join(
    character
    for character in map(chr, (*range(0x300, 0x2000), 0x200C, 0x200D, *range(0xA66F, 0xAC00)))
    if unicodedata.category(character) in ("Mn", "Mc", "Cf")
)
"""Accents and vowel signs that belong to the letter before them, and joiners, for a regular expression's brackets."""
_LETTER = rf"[^\W\d_][{MARKS}]*"
_LETTERS = re.compile(rf"(?:{_LETTER}){{{MIN_LETTERS},}}")
# Digits, and signs inside a word: addresses, numbers, times, names of files, tags.
_NOT_PLAIN = re.compile(r"[\d_@<>{}\\/]|[.:]\w")


def misspell(text: str, random: Generator, protected: frozenset[str] = frozenset()) -> str:
    """Return the text with typing errors in about `TYPO_RATE` of its longer words, and its spaces as they were.

    Words with digits, addresses, and words with a protected symbol stay as they are. A word that has no spaces around
    it because its script has none, such as a Chinese sentence, gets one error at most.

    Args:
        text: a sentence.
        random: consumed alike for texts of the same number of words, as long as no word is misspelled.
        protected: symbols that have to stay whole.
    """
    words = text.split(" ")
    # One draw for all words: scalar draws take most of the time otherwise.
    for index, draw in enumerate(random.random(len(words)).tolist()):
        if draw < TYPO_RATE and _is_plain(words[index], protected):
            words[index] = _with_typo(words[index], random)
    return " ".join(words)


def _is_plain(word: str, protected: frozenset[str]) -> bool:
    return not _NOT_PLAIN.search(word) and not any(symbol in word for symbol in protected)


def _with_typo(word: str, random: Generator) -> str:
    """Return the word with one error in its first run of `MIN_LETTERS` letters or more.

    The first letter stays, and the last one is at most swapped: without its last letter, "dogs" is another word.
    Accents and vowel signs stay with their letter.
    """
    run = _LETTERS.search(word)
    if run is None:
        return word
    kind, place = random.random(2).tolist()
    letters = re.findall(_LETTER, run[0])
    # Both letters of a swap are behind the first one.
    index = 1 + int(place * (len(letters) - 2))
    before, after = word[: run.start()] + "".join(letters[:index]), "".join(letters[index + 2 :]) + word[run.end() :]
    letter, following = letters[index : index + 2]
    if kind < 0.25:
        return before + following + after
    if kind < 0.5:
        return before + letter * 2 + following + after
    neighbours = NEIGHBOURS.get(letter.lower(), "")
    if kind < 0.75 and neighbours:
        key = neighbours[int(random.random() * len(neighbours))]
        return before + (key.upper() if letter.isupper() else key) + following + after
    # Swapping equal letters would change nothing.
    return before + (letter * 2 + following if letter == following else following + letter) + after


def _neighbours(layout: tuple[str, ...]) -> dict[str, set[str]]:
    """Return the keys that touch each key. Each row is half a key further to the right than the one above it."""
    keys = {(row, column): letter for row, letters in enumerate(layout) for column, letter in enumerate(letters)}
    around = [(0, -1), (0, 1), (-1, 0), (-1, 1), (1, -1), (1, 0)]
    return {
        letter: {keys[place] for down, right in around if (place := (row + down, column + right)) in keys}
        for (row, column), letter in keys.items()
    }


def _common_neighbours() -> dict[str, str]:
    of_layouts = [_neighbours(layout) for layout in _LAYOUTS]
    return {letter: "".join(sorted(set.intersection(*(one[letter] for one in of_layouts)))) for letter in of_layouts[0]}


NEIGHBOURS = _common_neighbours()
"""Letter -> the letters beside it on all three keyboards; none for `m`, `y` and `z`, whose places differ."""
