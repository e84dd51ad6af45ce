"""The demo's parallel text: English sentences with their German translations, from lexicon.yaml and the grammar.

The same seed gives the same bytes. No sentence is in two splits. The sentences of `test_new_combinations` contain
combinations of words that do not occur in training.
"""

import argparse
import random
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from tqdm import tqdm

from data_module.demo.grammar import (
    BARE,
    CASES,
    EVERY,
    GENDERS,
    HABEN,
    NO_PLURAL,
    NO_SINGULAR,
    NOTHING,
    PLURAL,
    POSSESSIVES,
    PRONOUNS,
    SEIN,
    THE,
    THESE,
    THIS,
    A,
    Adjective,
    Case,
    Clause,
    Combinations,
    Determiner,
    Mode,
    Nominal,
    Noun,
    Phrase,
    Verb,
    definite_article,
    noun_phrase,
    prepositional_phrase,
    with_s,
)
from data_module.system.files import atomic_file, user_path

SPLIT_SIZES = {"train": 20_000, "validation": 1_000, "test": 1_000, "test_new_combinations": 1_000}
HELD_OUT_FRACTION = 0.05
"""Fraction of all possible combinations that occur only in test_new_combinations."""


class Lexicon:
    """The words of lexicon.yaml."""

    def __init__(self) -> None:
        words = yaml.safe_load(Path(__file__).with_name("lexicon.yaml").read_text(encoding="utf-8"))
        self.names = [Nominal(name, dict.fromkeys(CASES, name)) for name in words["names"]]
        self.numerals = [Determiner(*numeral) for numeral in words["numerals"].items()]
        self.nouns = {
            name: [_noun(english, german, name) for english, german in nouns.items()]
            for name, nouns in words["nouns"].items()
        }
        self.adjectives = [
            Adjective(english, german.split(", ")[0], german.split(", ")[-1], group["classes"])
            for group in words["adjectives"]
            for english, german in group["words"].items()
        ]
        self.verbs = [_verb(*verb, **group) for group in words["verbs"] for verb in group.pop("words").items()]
        self.reporting_verbs = [_verb(*verb, subject=["person"]) for verb in words["reporting_verbs"].items()]
        self.modes = {name: _mode(name, **mode) for name, mode in words["modes"].items()}
        self.times = {name: [Phrase(*time) for time in group.items()] for name, group in words["times"].items()}
        self.frequency_adverbs = [Phrase(*adverb) for adverb in words["frequency_adverbs"].items()]
        self.question_words = [Phrase(*word) for word in words["question_words"].items()]
        self.conjunctions: dict[str, str] = words["conjunctions"]

    def combinations(self) -> list[tuple[str, str]]:
        """Return all combinations that the semantic classes allow, in the lexicon's order."""
        words = [(adjective.english, adjective.classes) for adjective in self.adjectives]
        words += [(verb.english, list(verb.object)) for verb in self.verbs]
        return [(word, noun.english) for word, classes in words for name in classes for noun in self.nouns[name]]


def _noun(english: str, german: str, semantic_class: str) -> Noun:
    singular, _, plural = english.partition("/")
    first, german_plural, *weak = german.split(", ")
    article, german_singular = first.split(" ")
    forms = singular, plural or with_s(singular), german_singular, german_plural
    return Noun(*forms, GENDERS[article], bool(weak), semantic_class)


def _verb(english: str, german: str, **valency: Any) -> Verb:
    base, past = english.split(", ")
    infinitive, third, participle = german.split(", ")
    prefix, _, infinitive = infinitive.rpartition("|")
    perfect = SEIN if participle.startswith("ist ") else HABEN
    return Verb(base, past, infinitive, third, participle.removeprefix("ist "), prefix, perfect, **valency)


def _mode(name: str, english: str, times: str, link: str = "", german: str = "") -> Mode:
    return Mode(name, english.split(), link, german.split(), times)


class Sentence(NamedTuple):
    """A sentence, its translation, and its combinations of words."""

    english: str
    german: str
    combinations: Combinations


NOW = ["present"] * 7 + ["future", "future", "can", "should", "want", "have", "allowed", "like"]
PAST = ["past"]
DEFINITE = {False: [THE] * 5 + [THIS, *POSSESSIVES], True: [THE] * 5 + [THESE, *POSSESSIVES]}
PREPOSITIONS: dict[str, tuple[str, str, Case, str]] = {
    "place": ("in", "in", "dative", "place"),
    "goal": ("to", "zu", "dative", "place"),
    "companion": ("with", "mit", "dative", "person"),
    "beneficiary": ("for", "für", "accusative", "person"),
}


SENTENCE_KINDS = {
    **{"statement": 6, "question": 4, "if": 2, "and": 1, "but": 1},
    **{"because": 3, "although": 1, "while": 1, "that": 3},
}


class Author:
    """Generates random sentences with their translations."""

    def __init__(self, lexicon: Lexicon, rng: random.Random) -> None:
        self.lexicon = lexicon
        self.rng = rng

    def chance(self, probability: float) -> bool:
        """Return True with this probability."""
        return self.rng.random() < probability

    def noun(self, classes: Sequence[str]) -> Noun:
        """Return a noun of these semantic classes, all nouns with the same probability."""
        return self.rng.choice([noun for name in classes for noun in self.lexicon.nouns[name]])

    def phrase(self, noun: Noun, plural: bool, determiners: list[Determiner], described: float = 0.4) -> Nominal:
        """Return a noun phrase, with an adjective with probability `described`."""
        adjectives = [word for word in self.lexicon.adjectives if noun.semantic_class in word.classes]
        adjective = self.rng.choice(adjectives) if self.chance(described) else None
        return noun_phrase(self.rng.choice(determiners), adjective, noun, plural)

    def subject(self, verb: Verb, negated: bool, relative: bool) -> Nominal:
        """Return a pronoun, name or noun phrase, the last possibly with a relative clause."""
        if "person" in verb.subject and self.chance(0.3):
            return self.rng.choice(PRONOUNS if self.chance(0.7) else self.lexicon.names)
        noun, plural = self.noun(verb.subject), self.chance(0.3)
        some = [] if negated else [BARE, *self.rng.sample(self.lexicon.numerals, 2)] if plural else [A, EVERY]
        nominal = self.phrase(noun, plural, DEFINITE[plural] + some, 0.4 if verb.third_person else 0)
        return self.with_relative_clause(nominal, noun) if relative and self.chance(0.15) else nominal

    def object(self, classes: Sequence[str], negated: bool) -> Nominal:
        """Return an object. In a negated clause, an indefinite object is negated ("kein")."""
        plural = self.chance(0.3)
        if negated:
            some = [NO_PLURAL if plural else NO_SINGULAR] * 5
        else:
            some = [BARE] * 3 + self.rng.sample(self.lexicon.numerals, 2) if plural else [A] * 4 + [EVERY]
        return self.phrase(self.noun(classes), plural, DEFINITE[plural] + some)

    def with_relative_clause(self, head: Nominal, noun: Noun) -> Nominal:
        """Return the nominal with a relative clause, of which it is the subject or object."""
        gender = "plural" if head.agreement == PLURAL else noun.gender
        pronoun = {case: definite_article(gender, case) for case in CASES}
        if gender == "plural":
            pronoun["dative"] = "denen"
        subjects_of = [verb for verb in self.lexicon.verbs if noun.semantic_class in verb.subject]
        objects_of = [verb for verb in self.lexicon.verbs if noun.semantic_class in verb.object]
        if subjects_of and (not objects_of or self.chance(0.6)):
            english_pronoun = "who" if noun.semantic_class == "person" else "that"
            subject = Nominal(english_pronoun, pronoun, head.agreement)
            clause = self.clause(self.tense(), main=False, verb=self.rng.choice(subjects_of), subject=subject)
            english, german = clause.english(), clause.german("last")
        else:
            verb, gap = self.rng.choice(objects_of), Nominal("", dict.fromkeys(CASES, ""), noun=noun.english)
            clause = self.clause(self.tense(), main=False, verb=verb, gap=gap)
            english, german = f"that {clause.english()}", f"{pronoun[verb.case]} {clause.german('last')}"
        return head._replace(
            english=f"{head.english} {english}",
            german={case: f"{form}, {german}," for case, form in head.german.items()},
            combinations=head.combinations | clause.combinations,
        )

    def tense(self) -> Sequence[str]:
        """Return the names of the modes that a clause may have."""
        return PAST if self.chance(0.33) else NOW

    def clause(
        self,
        modes: Sequence[str],
        main: bool = True,
        verb: Verb | None = None,
        subject: Nominal | None = None,
        gap: Nominal | None = None,
        negatable: bool = True,
    ) -> Clause:
        """Return a clause with the given verb, subject or object. Only main clauses have a front."""
        rng = self.rng
        mode = self.lexicon.modes[rng.choice(modes)]
        negated = negatable and self.chance(0.2)
        if not verb and self.chance(0.2):
            mode = self.lexicon.modes["was" if modes == PAST else "is"]
            adjective = rng.choice(self.lexicon.adjectives)
            verb = Verb(adjective.english, "", adjective.german, "", "", subject=adjective.classes)
        verb = verb or rng.choice(self.lexicon.verbs)
        subject = subject or self.subject(verb, negated, relative=main)
        time, front, adverb = NOTHING, NOTHING, NOTHING
        if self.chance(0.35) and not (negated and not main):
            time = rng.choice(self.lexicon.times[mode.times])
            if main and (negated or self.chance(0.6)):
                time, front = NOTHING, time
        elif mode.name in ("present", "past", "is", "was") and not negated and self.chance(0.25):
            adverb = rng.choice(self.lexicon.frequency_adverbs)
        return Clause(
            subject,
            verb,
            mode,
            object=gap or (self.object(verb.object, negated) if verb.object else None),
            recipient=self.phrase(self.noun(verb.recipient), False, [THE, *DEFINITE[False]])
            if verb.recipient
            else None,
            adjunct=self.adjunct(verb.adjuncts),
            front=front,
            time=time,
            adverb=adverb,
            negated=negated,
        )

    def adjunct(self, kinds: Sequence[str]) -> Phrase:
        """Return a prepositional phrase of one of these kinds, or none. A goal is always expressed."""
        if not kinds or ("goal" not in kinds and self.chance(0.4)):
            return NOTHING
        english, german, case, semantic_class = PREPOSITIONS[self.rng.choice(kinds)]
        nominal = self.phrase(self.noun([semantic_class]), False, [*DEFINITE[False], A])
        return prepositional_phrase(english, german, case, nominal)

    def sentence(self) -> Sentence:
        """Return a sentence of one or two clauses."""
        kind = self.rng.choices(list(SENTENCE_KINDS), list(SENTENCE_KINDS.values()))[0]
        conjunction, tense = self.lexicon.conjunctions.get(kind, ""), self.tense()
        if kind == "statement":
            clauses = [self.clause(tense)]
            english, german = clauses[0].english(), clauses[0].german()
        elif kind == "question":
            clause = self.clause(tense, negatable=False)
            clauses = [replace(clause, front=self.rng.choice([NOTHING, NOTHING, *self.lexicon.question_words]))]
            english, german = clauses[0].english(question=True), clauses[0].german("first")
        elif kind == "if":
            clauses = [self.clause(["present"], main=False), self.clause(NOW, main=False)]
            english = f"if {clauses[0].english()}, {clauses[1].english()}"
            german = f"{conjunction} {clauses[0].german('last')}, {clauses[1].german('first')}"
        elif kind in ("and", "but"):
            clauses = [self.clause(tense), self.clause(self.tense())]
            english = f"{clauses[0].english()}, {kind} {clauses[1].english()}"
            german = f"{clauses[0].german()}, {conjunction} {clauses[1].german()}"
        else:
            verb = self.rng.choice(self.lexicon.reporting_verbs) if kind == "that" else None
            tense = ["present"] if kind in ("that", "while") and tense is NOW else tense
            clauses = [self.clause(tense, verb=verb), self.clause(self.tense() if verb else tense, main=False)]
            english = f"{clauses[0].english()} {kind} {clauses[1].english()}"
            german = f"{clauses[0].german()}, {conjunction} {clauses[1].german('last')}"
        mark = "?" if kind == "question" else "."
        combinations = Combinations().union(*(clause.combinations for clause in clauses))
        return Sentence(punctuated(english, mark), punctuated(german, mark), combinations)


def punctuated(sentence: str, mark: str) -> str:
    """Capitalize the sentence, add its final mark, and remove repeated and final commas of relative clauses."""
    sentence = re.sub(",+", ",", sentence).rstrip(",")
    return sentence[0].upper() + sentence[1:] + mark


def word_forms(sentence: Sentence) -> set[str]:
    """Return the distinct words of both sides, as spelled."""
    return set(re.findall(r"\w+", sentence.english + " " + sentence.german))


def distinct_sentences(author: Author) -> Iterator[Sentence]:
    """Yield sentences endlessly, none with an English or German side that has been yielded before."""
    seen: set[str] = set()
    while True:
        sentence = author.sentence()
        if sentence.english not in seen and sentence.german not in seen:
            seen |= {sentence.english, sentence.german}
            yield sentence


def demo_corpus(seed: int = 1) -> dict[str, list[Sentence]]:
    """Return the sentences of every split.

    Every sentence of test_new_combinations has a held-out combination, and no other sentence has one. All word forms
    of the other splits occur in training.
    """
    rng, lexicon = random.Random(seed), Lexicon()
    held_out = {combination for combination in lexicon.combinations() if rng.random() < HELD_OUT_FRACTION}
    stream = distinct_sentences(Author(lexicon, rng))
    bar = tqdm(desc="writing sentences", total=sum(SPLIT_SIZES.values()), delay=2)

    def take(size: int, candidates: Iterator[Sentence]) -> list[Sentence]:
        taken = []
        for sentence in islice(candidates, size):
            taken.append(sentence)
            bar.update()
        return taken

    splits = {"train": take(SPLIT_SIZES["train"], (s for s in stream if not s.combinations & held_out))}
    known = set().union(*map(word_forms, splits["train"]))
    for name in ("validation", "test", "test_new_combinations"):
        new = name == "test_new_combinations"
        candidates = (s for s in stream if bool(s.combinations & held_out) == new and word_forms(s) <= known)
        splits[name] = take(SPLIT_SIZES[name], candidates)
    bar.close()
    return splits


def write_demo_corpus(folder: Path, seed: int = 1) -> None:
    """Write `<split>.en` and `<split>.de` of every split. Files with the right content are not written again."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, sentences in demo_corpus(seed).items():
        for suffix, lines in (("en", [s.english for s in sentences]), ("de", [s.german for s in sentences])):
            path, content = folder / f"{split}.{suffix}", "".join(f"{line}\n" for line in lines).encode()
            if not path.is_file() or path.read_bytes() != content:
                with atomic_file(path) as file:
                    file.write(content)


def main() -> None:
    """Run the command line: `python -m data_module.demo.corpus FOLDER`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=user_path, metavar="FOLDER")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    write_demo_corpus(arguments.folder, arguments.seed)
    sizes = ", ".join(f"{size} pairs of {split}" for split, size in SPLIT_SIZES.items())
    print(f"{arguments.folder} holds {sizes}", file=sys.stderr)


if __name__ == "__main__":
    main()
