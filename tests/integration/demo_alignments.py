"""Sentences of the demo's grammar with the words that are translations of each other, and the error of alignments.

A lexicon whose words carry numbers writes the same sentences from the same seed: words with one number belong together.
"""

import random
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from data_module.demo.corpus import Author, Lexicon

_MARK = re.compile(r"\d+~")
_FORMS = {
    "nouns": ("english", "english_plural", "german", "german_plural"),
    "adjectives": ("english", "german", "stem"),
    "verbs": ("english", "english_past", "infinitive", "third_person", "participle"),
    "reporting_verbs": ("english", "english_past", "infinitive", "third_person", "participle"),
    "frequency_adverbs": ("english", "german"),
}


class AlignedPair(NamedTuple):
    source: str
    target: str
    words: set[tuple[int, int]]
    """Each content word that is one word in both languages: its places in source and target."""


def aligned_pairs(seed: int, count: int) -> Iterator[AlignedPair]:
    plain, marked = (Author(lexicon, random.Random(seed)) for lexicon in (Lexicon(), _marked_lexicon()))
    for _ in range(count):
        pair, with_marks = plain.sentence(), marked.sentence()
        sides = [[_MARK.findall(word) for word in text.split()] for text in (with_marks.english, with_marks.german)]
        # A separable prefix before an infinitive stands in front of the verb's mark.
        source, target = ([marks[0] if marks else "" for marks in side] for side in sides)
        single = [mark for mark, times in Counter(source).items() if times == 1 == target.count(mark) and mark]
        yield AlignedPair(pair.english, pair.german, {(source.index(mark), target.index(mark)) for mark in single})


def _marked_lexicon() -> Lexicon:
    lexicon, number = Lexicon(), 0

    def mark(word: Any, forms: tuple[str, ...]) -> Any:
        nonlocal number
        number += 1
        return word._replace(**{form: f"{number}~{getattr(word, form)}" for form in forms})

    for name, forms in _FORMS.items():
        words = getattr(lexicon, name)
        if isinstance(words, dict):
            words = {kind: [mark(word, forms) for word in group] for kind, group in words.items()}
        else:
            words = [mark(word, forms) for word in words]
        setattr(lexicon, name, words)
    return lexicon


def alignment_error(pairs: list[AlignedPair], alignments: list[list[tuple[int, int]]]) -> float:
    """Return the alignment error rate (Och and Ney 2003) of the target words whose source word is known."""
    right = found = known = 0
    for pair, alignment in zip(pairs, alignments, strict=True):
        places = {place for _, place in pair.words}
        links = {link for link in alignment if link[1] in places}
        right, found, known = right + len(links & pair.words), found + len(links), known + len(pair.words)
    return 1 - 2 * right / (found + known)
