"""Noise for training text: text as users type it.

A model that has seen no upper case, no typing errors and no web addresses translates them badly. Noise like this in
part of the training text makes it robust (Belinkov and Bisk 2018, "Synthetic and Natural Noise Both Break Neural
Machine Translation").
"""

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import fields
from string import ascii_letters, digits

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from data_module.settings import NoiseSettings
from data_module.tokenization.tokenizer import is_blank

NOISE_KINDS: tuple[str, ...] = tuple(field.name for field in fields(NoiseSettings))
"""The kinds of noise: keys of `corpus.noise`, in the order in which they are applied.

Strings are inserted last, so that no other kind changes them.
"""
CASINGS: tuple[str, ...] = ("lower_case", "title_case", "upper_case")
TYPO_RATE = 1 / 6
"""Probability that a word of `MIN_LETTERS` letters or more is misspelled."""
MIN_LETTERS = 4
NEIGHBOURS = {
    keys[0]: keys[1:]
    for keys in (
        *("aq", "bghnv", "cdfvx", "dcefrsx", "edrs", "fcdgrtv", "gbfhtv", "hbgjnu", "ijkou", "jhiknu", "kijlo", "lkop"),
        *("nbhj", "oiklp", "plo", "qaw", "rdeft", "sdewx", "tfgr", "uhij", "vbcfg", "wqs", "xcds"),
    )
}
"""Letter -> the letters that touch it on QWERTY, QWERTZ and AZERTY keyboards; none for `m`, `y` and `z`, which move."""
_MARKS = "".join(
    character
    for character in map(chr, (*range(0x300, 0x2000), 0x200C, 0x200D, *range(0xA66F, 0xAC00)))
    if unicodedata.category(character) in ("Mn", "Mc", "Cf")
)
"""Accents and vowel signs that belong to the letter before them, and joiners, for a regular expression's brackets."""
_LETTER = rf"[^\W\d_][{_MARKS}]*"
_LETTERS = re.compile(rf"(?:{_LETTER}){{{MIN_LETTERS},}}")
# Digits, and signs inside a word: addresses, numbers, times, names of files, tags.
_NOT_PLAIN = re.compile(r"[\d_@<>{}\\/]|[.:]\w")
_FINAL = ".!?…。！？؟۔।"
_FIRST_LETTER = re.compile(r"(?:^|(?<= ))([^\w ]*)([^\W\d_])")
# Three letters or digits, because a full stop after fewer often ends an abbreviation.
_SENTENCE_END = re.compile(rf"(?<=[\w{_MARKS}]{{3}}[{_FINAL}]) (?=\S)")


def draw_kinds(settings: NoiseSettings, num_pairs: int, random: Generator) -> NDArray[np.bool_]:
    """Draw the kinds of noise that each pair gets.

    Kinds are drawn independently of each other, except that a pair gets at most one of `CASINGS`. A uniform number per
    pair is drawn for the casing, and one for each other kind, whatever the settings.

    Returns:
        Whether each pair gets each kind, bool [num_pairs, len(NOISE_KINDS)]; columns as in `NOISE_KINDS`.
    """
    drawn = np.zeros((num_pairs, len(NOISE_KINDS)), dtype=bool)
    casing, low = random.random(num_pairs), 0.0
    for column, kind in enumerate(NOISE_KINDS):
        probability = getattr(settings, kind)
        if kind in CASINGS:
            drawn[:, column] = (low <= casing) & (casing < low + probability)
            low += probability
        else:
            drawn[:, column] = random.random(num_pairs) < probability
    return drawn


def add_noise(
    source: str, target: str, kinds: Sequence[str], random: Generator, protected: frozenset[str] = frozenset()
) -> tuple[str, str]:
    """Return a pair of sentences, whose white space is and stays normalized, with some of `NOISE_KINDS`, in that order.

    Words that contain a protected symbol, such as a user symbol of the tokenizer, stay as they are. The target differs
    where the noise changes what a correct translation is: in the casing and in inserted strings.
    """
    for kind in filter(kinds.__contains__, NOISE_KINDS):
        if kind in CASINGS:
            source, target = with_casing(source, kind, protected), with_casing(target, kind, protected)
        elif kind == "typos":
            source = misspell(source, random, protected)
        elif kind == "no_final_punctuation":
            source = without_final_punctuation(source, protected)
        else:
            source, target = insert(string_of(kind, random), source, target, random, protected)
    return source, target


def with_casing(text: str, kind: str, protected: frozenset[str] = frozenset()) -> str:
    """Return the text in the casing `kind`, one of `CASINGS`.

    In title case the first letter of each word is upper-case, and other letters stay as they are.
    """
    change = _CASE_CHANGES[kind]
    if not any(symbol in text for symbol in protected):
        return change(text)
    words = text.split(" ")
    return " ".join(word if any(symbol in word for symbol in protected) else change(word) for word in words)


def without_final_punctuation(text: str, protected: frozenset[str] = frozenset()) -> str:
    """Return the text without full stops, exclamation and question marks at its end.

    A text with nothing visible before them, or with nothing but protected symbols, stays as it is.
    """
    rest = _split_final(text, protected)[0]
    return text if all(word in protected or is_blank(word) for word in rest.split(" ")) else rest


def insert(
    string: str, source: str, target: str, random: Generator, protected: frozenset[str] = frozenset()
) -> tuple[str, str]:
    """Return both sides with a string put at matching places, with a space on each side of it where there is text.

    The place is drawn: the start, the end, before the final punctuation, or between two sentences if both sides have
    the same number of sentences, two or more. Otherwise the end is taken. The source keeps its prefix as first word: a
    protected symbol that the target does not have, such as the name of a language.
    """
    place, which = random.random(2).tolist()
    if place < 0.25:
        first, *rest = source.split(" ")
        if first in protected and first not in target:
            return " ".join([first, string, *rest]), f"{string} {target}".rstrip(" ")
        return f"{string} {source}".rstrip(" "), f"{string} {target}".rstrip(" ")
    if place < 0.5:
        return _before_final(string, source, protected), _before_final(string, target, protected)
    if place < 0.75:
        source_ends, target_ends = ([end.start() for end in _SENTENCE_END.finditer(side)] for side in (source, target))
        if source_ends and len(source_ends) == len(target_ends):
            index = int(which * len(source_ends))
            ends = ((source, source_ends[index]), (target, target_ends[index]))
            source, target = (f"{side[:end]} {string}{side[end:]}" for side, end in ends)
            return source, target
    return f"{source} {string}".lstrip(" "), f"{target} {string}".lstrip(" ")


def _before_final(string: str, text: str, protected: frozenset[str]) -> str:
    text, final = _split_final(text, protected)
    return f"{text} {string}".lstrip(" ") + final


def _split_final(text: str, protected: frozenset[str]) -> tuple[str, str]:
    """Return the text and its final punctuation, which is empty where the last word has a protected symbol."""
    last_word = text[text.rfind(" ") + 1 :]
    if any(symbol in last_word for symbol in protected):
        return text, ""
    stripped = text.rstrip(_FINAL).rstrip(" ")
    # A space before the punctuation, as in tokenized text, belongs to the punctuation.
    return stripped, text[len(stripped) :]


def _title_case(text: str) -> str:
    # `str.title` also capitalizes the s of "dog's", and lower-cases "USA".
    return _FIRST_LETTER.sub(lambda match: match[1] + match[2].title(), text)


_CASE_CHANGES: dict[str, Callable[[str], str]] = {
    "lower_case": str.lower,
    "title_case": _title_case,
    "upper_case": str.upper,
}


def misspell(text: str, random: Generator, protected: frozenset[str] = frozenset()) -> str:
    """Return the text with typing errors in about `TYPO_RATE` of its longer words, and its spaces as they were.

    Words with digits, addresses, and words with a protected symbol stay as they are. A word that has no spaces around
    it because its script has none, such as a Chinese sentence, gets one error at most.
    """
    words = text.split(" ")
    # One draw for all words: scalar draws take most of the time otherwise.
    for index, draw in enumerate(random.random(len(words)).tolist()):
        word = words[index]
        if draw < TYPO_RATE and not _NOT_PLAIN.search(word) and not any(symbol in word for symbol in protected):
            words[index] = _with_typo(word, random)
    return " ".join(words)


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
    # Both letters of a swap come after the first letter.
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


_SYLLABLES = (
    *("al", "an", "ar", "ba", "bel", "ber", "bo", "ca", "co", "da", "del", "den", "di", "do", "el", "en", "fa", "fi"),
    *("ga", "gen", "go", "ha", "hel", "in", "ja", "jo", "ka", "ker", "ko", "la", "lin", "lo", "ma", "mar", "mi", "mo"),
    *("na", "net", "ni", "no", "or", "pa", "per", "pi", "ra", "ri", "ro", "sa", "sen", "si", "so", "sta", "ta", "tech"),
    *("ter", "ti", "to", "tri", "va", "ver", "vi", "wa", "wi", "xa", "zen", "zo"),
)
_ENDINGS = ("com", "com", "com", "org", "net", "de", "fr", "eu", "io", "co.uk", "info", "com.au", "es", "pl")
_EMOJI = (
    *"😀😃😄😁😆😅😂🤣🙂🙃😉😊😇🥰😍🤩😘😋😜🤪🤗🤔😐😏🙄😬😌😔😴😷🥳😎🤓😟😮🥺😢😭😱😩😡🤬💀💩👻🤖🙈",
    *"💔💕💙💛💯💥💪👍👎👌👏🙌🙏👋👉🔥✨⭐🎉🎁🎂🏆⚽🎵📷📱💻📧📞📅✅❌❓❗🌍🌹🌲🍕☕🍷🚗🚀🏠🐶🐱🦄",
    # Several code points each: variants, skin tones, joined emoji and flags.
    *("❤️", "⚠️", "✈️", "👍🏽", "🙏🏻", "👩‍💻", "🤷‍♀️", "🇩🇪", "🇬🇧", "🇪🇺"),
)
_PATTERNS = {
    "web_address": ("https://W.E", "www.W.E/W", "https://W-W.E/W/NDDD.html", "http://www.W.E/W?v=AAAAAAAA"),
    "email_address": ("W@W.E", "W.W@W.E", "W_WDD@W-W.E"),
    # Amounts, times, dates and telephone numbers.
    "number": ("NDDD", "N,DDD.DD", "$NDD.DD", "DD.D%", "1D:4D", "20DD-0N-1D", "1D.0N.20DD", "+4N DD DDDDDDD"),
}
"""In a pattern, W is an invented word, E the ending of a domain, D a digit, N one above 0, A a letter or digit."""
_ALPHABETS = {"E": _ENDINGS, "D": digits, "N": digits[1:], "A": ascii_letters + digits}


def string_of(kind: str, random: Generator) -> str:
    """Return a string to insert, such as `www.kado.eu/belmi`, `sen.zoti@mato.de` or `$104.20`."""
    if kind == "emoji":  # Most often one, at most three, alike or not.
        first, second = (_choice(_EMOJI, random) for _ in range(2))
        return _choice((first, first, first, first + second, first * 3), random)
    pattern = _choice(_PATTERNS[kind], random)
    return re.sub("[WEDNA]", lambda slot: _fill(slot[0], random), pattern)


def _fill(slot: str, random: Generator) -> str:
    if slot != "W":
        return _choice(_ALPHABETS[slot], random)
    return "".join(_choice(_SYLLABLES, random) for _ in range(2 + int(random.random() * 3)))


def _choice(options: Sequence[str], random: Generator) -> str:
    # A tenth of the time of `random.choice`.
    return options[int(random.random() * len(options))]
