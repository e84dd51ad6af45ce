"""Noise in training text: its kinds by hand, and its frequencies."""

import itertools
import re

import pytest
from numpy.random import PCG64, Generator, SeedSequence

from data_module.corpus.noise import (
    CASINGS,
    NEIGHBOURS,
    NOISE_KINDS,
    add_noise,
    draw_kinds,
    insert,
    misspell,
    string_of,
)
from data_module.settings import NoiseSettings
from data_module.tokenization.tokenizer import normalize_white_space

SYMBOLS = frozenset({">>de<<", "<b>", "</b>", "__NAME__"})


def generator(*seed: int) -> Generator:
    return Generator(PCG64(SeedSequence(seed)))


def noisy(source: str, target: str, kind: str, seed: int = 1) -> tuple[str, str]:
    return add_noise(source, target, [kind], generator(seed), SYMBOLS)


TEXT = "the NASA's (old) House, 2nd street."
TRANSLATION = "das „alte“ HAUS: Straße von ihm."
TAGGED = ">>de<< my <b>Old</b> house of __NAME__s"


@pytest.mark.parametrize(
    ("kind", "text", "changed"),
    [
        ("lower_case", TEXT, "the nasa's (old) house, 2nd street."),
        ("lower_case", TRANSLATION, "das „alte“ haus: straße von ihm."),
        ("title_case", TEXT, "The NASA's (Old) House, 2nd Street."),
        ("title_case", TRANSLATION, "Das „Alte“ HAUS: Straße Von Ihm."),
        ("title_case", TAGGED, ">>de<< My <b>Old</b> House Of __NAME__s"),
        ("upper_case", TEXT, "THE NASA'S (OLD) HOUSE, 2ND STREET."),
        ("upper_case", TRANSLATION, "DAS „ALTE“ HAUS: STRASSE VON IHM."),
        ("upper_case", TAGGED, ">>de<< MY <b>Old</b> HOUSE OF __NAME__s"),
        ("no_final_punctuation", TEXT, "the NASA's (old) House, 2nd street"),
        ("no_final_punctuation", "Really?!", "Really"),
        ("no_final_punctuation", "Wait...", "Wait"),
        ("no_final_punctuation", "他来了。", "他来了"),
        ("no_final_punctuation", "A dog .", "A dog"),
        ("no_final_punctuation", "No stop", "No stop"),
        ("no_final_punctuation", "?", "?"),
        ("no_final_punctuation", "See <b>this</b>.", "See <b>this</b>."),
        ("no_final_punctuation", "See <b>this</b> now.", "See <b>this</b> now"),
        ("no_final_punctuation", ">>de<< ?", ">>de<< ?"),
        ("no_final_punctuation", "\xa0\u200b !", "\xa0\u200b !"),
        ("no_final_punctuation", "यह कुत्ता है।", "यह कुत्ता है"),
    ],
)
def test_kinds_by_hand(kind: str, text: str, changed: str) -> None:
    """Casing is that of both sides; the target keeps its punctuation."""
    assert noisy(text, text, kind) == (changed, changed if kind in CASINGS else text)


def typos_of(word: str) -> set[str]:
    """All results of one error behind the first letter, from the definition. Accents stay with their letter."""
    letters = re.findall(r"[^\W\d_]\W*", word)
    found = set()
    for i in range(1, len(letters) - 1):
        before, letter, following, after = letters[:i], letters[i], letters[i + 1], letters[i + 2 :]
        keys = [[key, following] for key in NEIGHBOURS.get(letter, "")]
        for middle in ([following], [letter, letter, following], [following, letter], *keys):
            found.add("".join([*before, *middle, *after]))
    return found


@pytest.mark.parametrize(
    "word",
    [
        *("mountain", "abby", "llama", "größer", "Привет", "zzzz", "اكتبوا"),
        *("हिन्दुस्तान", "cafe\u0301teria", "ภาษาไทยที่นี่"),
    ],
)
def test_every_single_typo_occurs_and_nothing_else(word: str) -> None:
    random = generator(1)
    found = {misspell(word, random) for _ in range(20_000)}
    assert found == typos_of(word) | {word}


def test_typos_are_of_four_kinds_in_a_sixth_of_the_longer_words() -> None:
    # No two neighbouring letters are equal, and all inner letters have neighbouring keys.
    words = "hockey 123456 dog http://hockey.de hockey@x.de (hockey)."
    text = " ".join([words] * 10_000)
    noise = misspell(text, generator(2)).split(" ")
    counts = {"drop": 0, "double": 0, "swap": 0, "key": 0}
    for before, after in zip(text.split(" "), noise, strict=True):
        if before not in ("hockey", "(hockey)."):
            assert after == before
        elif after != before:
            assert after.startswith(before[:2] if before[0] == "(" else before[:1])
            assert after.endswith(".") == before.endswith(".")
            same_letters = sorted(before) == sorted(after)
            kind = {-1: "drop", 1: "double", 0: "swap" if same_letters else "key"}[len(after) - len(before)]
            counts[kind] += 1
    # 20,000 words, a sixth of them misspelled, a quarter of these in each way; five standard deviations.
    expected = 20_000 / 6
    assert abs(sum(counts.values()) - expected) < 5 * (expected * 5 / 6) ** 0.5
    assert all(abs(count - expected / 4) < 5 * (expected / 4) ** 0.5 for count in counts.values()), counts


def test_neighbouring_keys() -> None:
    """Letters that touch on QWERTY, QWERTZ and AZERTY keyboards, read off three keyboards."""
    by_hand = {"a": "q", "e": "drs", "g": "bfhtv", "i": "jkou", "l": "kop", "n": "bhj", "q": "aw", "m": "", "z": ""}
    assert {letter: NEIGHBOURS.get(letter, "") for letter in by_hand} == by_hand
    assert all(letter in NEIGHBOURS[other] for letter, others in NEIGHBOURS.items() for other in others)


def test_a_typo_keeps_the_case_and_protected_symbols() -> None:
    random = generator(3)
    capitals = {misspell("HOUSE", random) for _ in range(2000)}
    assert all(word.isupper() for word in capitals)
    assert "HOUAE" not in capitals
    assert "HOUDE" in capitals
    assert {misspell("here<b>here __NAME__ >>de<<", random, SYMBOLS) for _ in range(500)} == {
        "here<b>here __NAME__ >>de<<"
    }
    assert {misspell("NAMES", random, frozenset({"NAME"})) for _ in range(500)} == {"NAMES"}


FORMS = {
    "web_address": r"(https?://(www\.)?|www\.)[a-z-]+(\.[a-z]+)+(/[a-z]+)*(/\d+\.html|\?v=\w{8})?",
    "email_address": r"[a-z]+([._][a-z]+)?\d*@[a-z-]+(\.[a-z]+)+",
    "number": r"[+$]?\d[\d,.: -]*\d%?",
    "emoji": r"[^\x00-\x7f]{1,12}",
}


@pytest.mark.parametrize("kind", ["web_address", "email_address", "number", "emoji"])
def test_strings_have_their_form_and_rarely_repeat(kind: str) -> None:
    random = generator(4)
    strings = [string_of(kind, random) for _ in range(5000)]
    assert not [one for one in strings if not re.fullmatch(FORMS[kind], one)]
    assert len(set(strings)) > (4800 if kind.endswith("address") else 3000 if kind == "number" else 500)
    assert strings == [normalize_white_space(one) for one in strings]


def test_a_string_goes_to_matching_places() -> None:
    source, target = "Look at this. It is old", "Sieh dir das hier. Es ist alt."
    found = set()
    for seed in range(200):
        noise, translation = noisy(source, target, "email_address", seed)
        [address] = re.findall(r"\S+@\S+\w", noise)
        found.add((noise.replace(address, "@"), translation.replace(address, "@")))
    assert found == {
        ("@ Look at this. It is old", "@ Sieh dir das hier. Es ist alt."),
        ("Look at this. @ It is old", "Sieh dir das hier. @ Es ist alt."),
        # Before the final punctuation, which the source does not have.
        ("Look at this. It is old @", "Sieh dir das hier. Es ist alt @."),
        ("Look at this. It is old @", "Sieh dir das hier. Es ist alt. @"),
    }


@pytest.mark.parametrize(
    ("source", "target"),
    [
        # Behind the name of a language.
        (">>de<< | Dogs |", "| Hunde |"),
        # Not behind an abbreviation, and a tokenized full stop stays apart.
        ("| Dr. No | . |", "| Dr. No |. |"),
        # Not between sentences where their numbers differ.
        ("| They came. Fine |", "| Gut |"),
        ("| They came. Both left. Fine |", "| Alle kamen. Gut |"),
        # Not into a word with a tag.
        ("| A <b>dog</b>. |", "| Ein Hund |"),
        # Not behind a name, which both sides have, nor into a pair of tags.
        ("| __NAME__ saw it |", "| Das sah __NAME__ |"),
        ("| <b> My dog </b> runs |", "| Es läuft <b> mein Hund </b> |"),
        # Between sentences of a script with vowel signs.
        ("| यह कुत्ता। | वह |", "| The dog. | He |"),
        ("|", "|"),
    ],
)
def test_where_a_string_does_not_go(source: str, target: str) -> None:
    """Bars are its places, in the same order on both sides."""

    def filled(text: str, place: int) -> str:
        numbers = itertools.count()
        return re.sub(r" \||\| ?", lambda bar: bar[0].replace("|", "@") if next(numbers) == place else "", text)

    places = {(filled(source, place), filled(target, place)) for place in range(source.count("|"))}
    random, clean = generator(4), (filled(source, -1), filled(target, -1))
    assert {insert("@", *clean, random, SYMBOLS) for _ in range(200)} == places


def test_the_result_depends_on_the_generator_alone() -> None:
    pair = "A quick brown dog sees yellow houses.", "Ein Hund."
    one, same, other = (add_noise(*pair, NOISE_KINDS, generator(seed)) for seed in (1, 1, 2))
    assert one == same != other
    assert add_noise(*pair, NOISE_KINDS[::-1], generator(1)) == one


def test_white_space_stays_normalized() -> None:
    random = generator(5)
    for source, target in (("A dog . It barks !", "Ein Hund. Er bellt!"), (".", "."), ("a", "b"), ("", "")):
        for _ in range(200):
            kinds = [kind for kind in NOISE_KINDS if random.random() < 0.5]
            sides = add_noise(source, target, kinds, random)
            assert list(sides) == [normalize_white_space(side) for side in sides], kinds


def test_drawn_kinds_have_their_probabilities() -> None:
    settings = NoiseSettings(lower_case=0.2, title_case=0.1, upper_case=0.3, typos=0.5, emoji=0.01, number=1.0)
    drawn = draw_kinds(settings, 100_000, generator(6))
    assert drawn.shape == (100_000, len(NOISE_KINDS))
    for kind, share in zip(NOISE_KINDS, drawn.mean(0), strict=True):
        probability = getattr(settings, kind)
        assert abs(share - probability) <= 5 * (probability * (1 - probability) / 100_000) ** 0.5, kind
    cased = drawn[:, [NOISE_KINDS.index(kind) for kind in CASINGS]]
    assert cased.sum(1).max() == 1
    both = drawn[:, NOISE_KINDS.index("typos")] & drawn[:, NOISE_KINDS.index("upper_case")]
    assert both.mean() == pytest.approx(0.15, abs=0.006)
