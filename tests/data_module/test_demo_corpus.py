"""The demo corpus: its German compared with hand-written forms, and its splits."""

import os
import re
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import pytest

from data_module.demo import corpus as demo_corpus
from data_module.demo import grammar as demo_grammar
from data_module.demo.corpus import Lexicon, Sentence
from data_module.demo.grammar import THE, Clause, Nominal, Phrase, Verb, noun_phrase

LEXICON = Lexicon()
NOUNS = {noun.english: noun for nouns in LEXICON.nouns.values() for noun in nouns}
ADJECTIVES = {adjective.english: adjective for adjective in LEXICON.adjectives}
VERBS = {verb.english: verb for verb in LEXICON.verbs + LEXICON.reporting_verbs}
NUMERALS = {numeral.english: numeral for numeral in LEXICON.numerals}
DETERMINERS = [
    THE,
    demo_grammar.A,
    demo_grammar.EVERY,
    demo_grammar.THIS,
    demo_grammar.THESE,
    demo_grammar.BARE,
    *demo_grammar.POSSESSIVES,
]
BY_ENGLISH = {determiner.english: determiner for determiner in DETERMINERS} | NUMERALS
SHA256 = "c540e17d92fdd036363c9c071ede9d9506f5061534d8ad0ba29debec620671d8"
"""Of all files, one after another: figures of the demo are compared between versions."""


@pytest.fixture(scope="module")
def corpus() -> dict[str, list[Sentence]]:
    return demo_corpus.demo_corpus()


def phrase(determiner: str, adjective: str, noun: str, plural: bool = False) -> Nominal:
    return noun_phrase(BY_ENGLISH[determiner], ADJECTIVES.get(adjective), NOUNS[noun], plural)


DECLENSION = """
the old man | the old man | der alte Mann, den alten Mann, dem alten Mann
the - child | the child | das Kind, das Kind, dem Kind
the old man s | the old men | die alten Männer, die alten Männer, den alten Männern
a old man | an old man | ein alter Mann, einen alten Mann, einem alten Mann
a expensive car | an expensive car | ein teures Auto, ein teures Auto, einem teuren Auto
our - sister s | our sisters | unsere Schwestern, unsere Schwestern, unseren Schwestern
every - boy | every boy | jeder Junge, jeden Jungen, jedem Jungen
this tired pilot | this tired pilot | dieser müde Pilot, diesen müden Piloten, diesem müden Piloten
three ripe apple s | three ripe apples | drei reife Äpfel, drei reife Äpfel, drei reifen Äpfeln
"""


@pytest.mark.parametrize("line", DECLENSION.strip().splitlines())
def test_noun_phrases_agree_in_gender_number_and_case(line: str) -> None:
    words, english, german = line.split(" | ")
    determiner, adjective, noun, *plural = words.split()
    nominal = phrase(determiner.strip("-"), adjective, noun, bool(plural))
    assert nominal.english == english
    assert ", ".join(nominal.german[case] for case in demo_grammar.CASES) == german


def clause(subject: Nominal, verb: str, mode: str = "present", **rest: object) -> Clause:
    return Clause(subject, VERBS[verb], LEXICON.modes[mode], **rest)  # type: ignore[arg-type]


MAN, CHILD = phrase("the", "", "man"), phrase("the", "", "child")
CAR, NO_CAR = phrase("the", "", "car"), noun_phrase(demo_grammar.NO_SINGULAR, ADJECTIVES["red"], NOUNS["car"])
WE, ME = demo_grammar.PRONOUNS[3], demo_grammar.PRONOUNS[0]
YESTERDAY = Phrase("yesterday", "gestern")


@pytest.mark.parametrize(
    ("made", "english", "second", "last"),
    [
        (clause(MAN, "buy", object=CAR, negated=True), "the man does not buy the car",
         "der Mann kauft das Auto nicht", "der Mann das Auto nicht kauft"),
        (clause(MAN, "buy", object=NO_CAR, negated=True), "the man does not buy a red car",
         "der Mann kauft kein rotes Auto", "der Mann kein rotes Auto kauft"),
        (clause(MAN, "pick up", object=CHILD), "the man picks up the child", "der Mann holt das Kind ab",
         "der Mann das Kind abholt"),
        (clause(ME, "pick up", "want", object=MAN), "I want to pick up the man", "ich will den Mann abholen",
         "ich den Mann abholen will"),
        (clause(WE, "invite", "past", object=MAN, front=YESTERDAY), "yesterday we invited the man",
         "gestern haben wir den Mann eingeladen", None),
        (clause(MAN, "walk", "past", negated=True,
                adjunct=demo_grammar.prepositional_phrase("to", "zu", "dative", phrase("the", "", "school"))),
         "the man did not walk to the school", "der Mann ist nicht zur Schule gegangen",
         "der Mann nicht zur Schule gegangen ist"),
        (clause(MAN, "give", "can", object=CAR, recipient=CHILD, negated=True),
         "the man cannot give the car to the child", "der Mann kann dem Kind das Auto nicht geben",
         "der Mann dem Kind das Auto nicht geben kann"),
        (Clause(CAR, Verb("red", "", "rot", "", ""), LEXICON.modes["is"], negated=True), "the car is not red",
         "das Auto ist nicht rot", "das Auto nicht rot ist"),
    ],
)  # fmt: skip
def test_the_position_of_the_verb_in_german(made: Clause, english: str, second: str, last: str | None) -> None:
    assert made.english() == english
    assert made.german() == second
    if last:
        assert made.german("last") == last


def test_questions_begin_with_the_verb() -> None:
    made = clause(MAN, "close", object=phrase("every", "", "box"))
    assert made.english(question=True) == "does the man close every box"
    assert made.german("first") == "macht der Mann jede Kiste zu"


def test_no_english_form_has_two_meanings() -> None:
    meanings: dict[str, set[str]] = {}
    for noun in NOUNS.values():
        assert noun.english != noun.english_plural
        for form in (noun.english, noun.english_plural):
            meanings.setdefault(form, set()).add(noun.german)
    for verb in LEXICON.verbs + LEXICON.reporting_verbs:
        assert verb.english != verb.english_past, "present and past would be one"
        for form in (verb.english, verb.english_past, demo_grammar.third_person(verb.english)):
            meanings.setdefault(form, set()).add(verb.prefix + verb.infinitive)
    for adjective in LEXICON.adjectives:
        meanings.setdefault(adjective.english, set()).add(adjective.german)
    assert not {form: german for form, german in meanings.items() if len(german) > 1}


def test_sizes_and_distinctness(corpus: dict[str, list[Sentence]]) -> None:
    assert {name: len(sentences) for name, sentences in corpus.items()} == demo_corpus.SPLIT_SIZES
    sentences = [sentence for split in corpus.values() for sentence in split]
    for side in ([s.english for s in sentences], [s.german for s in sentences]):
        assert len(set(side)) == len(side)
        assert sum(len(line.split()) for line in side) / len(side) >= 8
        assert all(re.fullmatch(r"[A-ZÄÖÜ1-9][^.?|]*[^ ,.?][.?]", line) and "  " not in line for line in side)


def adjective_noun_pairs(sentences: list[Sentence]) -> list[set[tuple[str, str]]]:
    """Find attributes in the English text, independently of `Sentence.combinations`."""
    nouns = {form: noun.english for noun in NOUNS.values() for form in (noun.english, noun.english_plural)}
    words = [tokens(sentence.english.lower()) for sentence in sentences]
    return [{(a, nouns[b]) for a, b in pairwise(line) if a in ADJECTIVES and b in nouns} for line in words]


def test_new_combinations_do_not_occur_in_training(corpus: dict[str, list[Sentence]]) -> None:
    met = set().union(*(sentence.combinations for sentence in corpus["train"]))
    new = [sentence.combinations - met for sentence in corpus["test_new_combinations"]]
    assert all(new)
    read = set().union(*adjective_noun_pairs(corpus["train"]))
    assert read <= met
    attributes = [pairs - read for pairs in adjective_noun_pairs(corpus["test_new_combinations"])]
    assert sum(map(bool, attributes)) > 200
    assert {word for pairs in new for word, _ in pairs} & set(VERBS), "verbs with objects are held out too"


def tokens(line: str) -> list[str]:
    return re.findall(r"[\w']+|[^\w\s]", line)


def test_the_text_is_the_same_in_all_versions_and_files_are_not_rewritten(
    corpus: dict[str, list[Sentence]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever hashes this process has, which Python draws at random."""
    monkeypatch.setattr(demo_corpus, "demo_corpus", lambda seed: corpus)
    demo_corpus.write_demo_corpus(tmp_path)
    (tmp_path / "test.de").write_text("spoilt\n")
    os.utime(tmp_path / "train.en", ns=(1, 1))
    demo_corpus.write_demo_corpus(tmp_path)
    names = [f"{split}.{side}" for split in demo_corpus.SPLIT_SIZES for side in ("en", "de")]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    assert sha256(b"".join((tmp_path / name).read_bytes() for name in names)).hexdigest() == SHA256
    assert (tmp_path / "train.en").stat().st_mtime_ns == 1
