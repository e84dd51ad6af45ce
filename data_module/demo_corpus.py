"""The demo's parallel text: English sentences and their German translations, made by a small grammar.

A noun phrase (`Nominal`) and a `Clause` know both languages at once, so that every English sentence comes with
its one German translation: gender, case and adjective endings, verb second and verb last, separable verbs, modal
verbs and the perfect tense. The words are in demo_lexicon.yaml.
"""

import argparse
import os
import random
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

SPLIT_SIZES = {"train": 20_000, "validation": 1_000, "test": 1_000, "test_new_combinations": 1_000}
HELD_OUT_SHARE = 0.05
"""Share of all possible combinations that are in test_new_combinations only."""

Combinations = frozenset[tuple[str, str]]
"""Which words met: (adjective, the noun it is said of) and (verb, its object's noun), as English lemmas."""
Case = Literal["nominative", "accusative", "dative"]
CASES: tuple[Case, ...] = ("nominative", "accusative", "dative")
STRONG_ENDINGS = {
    "masculine": {"nominative": "er", "accusative": "en", "dative": "em"},
    "feminine": {"nominative": "e", "accusative": "e", "dative": "er"},
    "neuter": {"nominative": "es", "accusative": "es", "dative": "em"},
    "plural": {"nominative": "e", "accusative": "e", "dative": "en"},
}
GENDERS = {"der": "masculine", "die": "feminine", "das": "neuter"}
FIRST, THIRD, PLURAL = range(3)
"""What a finite verb agrees with: I; he, she and any singular; we, they and any plural."""
HABEN, SEIN = ("habe", "hat", "haben"), ("bin", "ist", "sind")


class Phrase(NamedTuple):
    """Words that do not inflect, in both languages."""

    english: str = ""
    german: str = ""
    combinations: Combinations = frozenset()


NOTHING = Phrase()


class Noun(NamedTuple):
    """A noun's principal forms; a weak one (der Junge, den Jungen) is declined in the singular too."""

    english: str
    english_plural: str
    german: str
    german_plural: str
    gender: str
    weak: bool
    semantic_class: str

    def inflected(self, case: Case, plural: bool) -> str:
        """The German form."""
        if plural:
            return self.german_plural + (
                "n" if case == "dative" and self.german_plural[-1] not in "ns" else ""
            )
        return self.german_plural if self.weak and case != "nominative" else self.german


class Adjective(NamedTuple):
    """An adjective: English, German as a predicate, German before an ending, the nouns it can be said of."""

    english: str
    german: str
    stem: str
    classes: list[str]


class Determiner(NamedTuple):
    """An article, possessive or numeral. Its German is declined like "der", like "ein", or not at all."""

    english: str = ""
    german: str = ""
    declined_like: Literal["der", "ein", ""] = ""

    def ending(self, gender: str, case: Case) -> str:
        """The ending of the German form."""
        endingless = self.declined_like == "ein" and (gender, case) in EIN_WITHOUT_ENDING
        return "" if endingless or not self.declined_like else STRONG_ENDINGS[gender][case]


EIN_WITHOUT_ENDING = {("masculine", "nominative"), ("neuter", "nominative"), ("neuter", "accusative")}
BARE, A, EVERY = Determiner(), Determiner("a", "ein", "ein"), Determiner("every", "jed", "der")
NO_SINGULAR, NO_PLURAL = Determiner("a", "kein", "ein"), Determiner("", "kein", "ein")
THE, THIS = Determiner("the", "d", "der"), Determiner("this", "dies", "der")
THESE = Determiner("these", "dies", "der")
POSSESSIVES = [Determiner(*words, "ein") for words in (("my", "mein"), ("our", "unser"), ("his", "sein"))]


class Nominal(NamedTuple):
    """What can be subject or object: English, German in each case, what a verb agrees with."""

    english: str
    german: dict[Case, str]
    agreement: int = THIRD
    noun: str = ""
    combinations: Combinations = frozenset()
    negative: bool = False


PRONOUNS = [
    Nominal("I", {"nominative": "ich"}, FIRST),
    Nominal("he", {"nominative": "er"}, THIRD),
    Nominal("she", {"nominative": "sie"}, THIRD),
    Nominal("we", {"nominative": "wir"}, PLURAL),
    Nominal("they", {"nominative": "sie"}, PLURAL),
]


def definite_article(gender: str, case: Case) -> str:
    """The German definite article, which is also the relative pronoun (but for "denen")."""
    return {"de": "die", "des": "das"}.get(article := "d" + STRONG_ENDINGS[gender][case], article)


def noun_phrase(
    determiner: Determiner, adjective: Adjective | None, noun: Noun, plural: bool = False
) -> Nominal:
    """Decline a noun phrase: of determiner and adjective the first that can shows gender and case."""
    gender = "plural" if plural else noun.gender
    german: dict[Case, str] = {}
    for case in CASES:
        ending = determiner.ending(gender, case)
        article = definite_article(gender, case) if determiner == THE else determiner.german + ending
        if ending:
            nominative_like = case == "nominative" or (case == "accusative" and gender != "masculine")
            adjective_ending = "e" if nominative_like and not plural else "en"
        else:
            adjective_ending = STRONG_ENDINGS[gender][case]
        german[case] = join(
            article, adjective and adjective.stem + adjective_ending, noun.inflected(case, plural)
        )
    words = join(adjective and adjective.english, noun.english_plural if plural else noun.english)
    article = "an" if determiner.english == "a" and words[0] in "aeiou" else determiner.english
    met = frozenset({(adjective.english, noun.english)} if adjective else ())
    agreement = PLURAL if plural else THIRD
    return Nominal(join(article, words), german, agreement, noun.english, met, determiner.german == "kein")


class Verb(NamedTuple):
    """A verb's principal parts and the semantic classes it combines with."""

    english: str
    english_past: str
    infinitive: str
    """Without the separable prefix."""
    third_person: str
    participle: str
    prefix: str = ""
    perfect: Sequence[str] = HABEN
    case: Case = "accusative"
    subject: Sequence[str] = ()
    object: Sequence[str] = ()
    recipient: Sequence[str] = ()
    adjuncts: Sequence[str] = ()

    def present(self, agreement: int) -> str:
        """The finite form, without the separable prefix."""
        first_person = self.infinitive.removesuffix("n").removesuffix("e") + "e"
        return (first_person, self.third_person, self.infinitive)[agreement]


class Mode(NamedTuple):
    """A tense, modal verb or copula: its finite forms for I, he and they, and the times it goes with."""

    name: str
    english: Sequence[str]
    link: str
    """What stands between the English auxiliary and the verb: "want to"."""
    german: Sequence[str]
    times: str


@dataclass(frozen=True)
class Clause:
    """A subject, a predicate and what belongs to it. A predicative adjective is placed like an infinitive."""

    subject: Nominal
    verb: Verb
    mode: Mode
    object: Nominal | None = None
    recipient: Nominal | None = None
    adjunct: Phrase = NOTHING
    front: Phrase = NOTHING
    time: Phrase = NOTHING
    adverb: Phrase = NOTHING
    negated: bool = False

    def english(self, question: bool = False) -> str:
        """The clause in English; "do" only where a question or negation needs it."""
        subject, auxiliary = self.subject.english, self.mode.english[self.subject.agreement]
        verb, adverb = join(self.mode.link, self.verb.english), self.adverb.english
        negation = "not" if self.negated else ""
        if question:
            predicate = join(auxiliary, subject, negation, adverb, verb)
        elif self.negated or auxiliary not in ("do", "does", "did"):
            predicate = join(subject, auxiliary, negation, adverb, verb).replace("can not", "cannot")
        elif auxiliary == "did":
            predicate = join(subject, adverb, self.verb.english_past)
        else:
            predicate = join(subject, adverb, third_person(verb) if auxiliary == "does" else verb)
        object_, recipient = (
            self.object and self.object.english,
            self.recipient and "to " + self.recipient.english,
        )
        return join(
            self.front.english, predicate, object_, recipient, self.adjunct.english, self.time.english
        )

    def german(self, verb_position: Literal["first", "second", "last"] = "second") -> str:
        """The clause in German."""
        agreement, verb, separable = self.subject.agreement, self.verb, False
        if self.mode.german:
            finite, final = self.mode.german[agreement], verb.prefix + verb.infinitive
        elif self.mode.name == "past":
            finite, final = verb.perfect[agreement], verb.participle
        else:
            finite, final, separable = verb.present(agreement), verb.prefix, True
        negation = "nicht" if self.negated and not (self.object and self.object.negative) else ""
        subject = self.subject.german["nominative"]
        recipient = self.recipient and self.recipient.german["dative"]
        object_ = self.object and self.object.german[verb.case]
        middle = join(self.time.german, self.adverb.german, recipient, object_, negation, self.adjunct.german)
        if verb_position == "last":
            return join(subject, middle, final + finite if separable else join(final, finite))
        if verb_position == "first" or self.front.german:
            return join(self.front.german, finite, subject, middle, final)
        return join(subject, finite, middle, final)

    @property
    def combinations(self) -> Combinations:
        """Which words meet in this clause."""
        parts = [part for part in (self.subject, self.object, self.recipient, self.adjunct) if part]
        met = Combinations().union(*(part.combinations for part in parts))
        if self.object and self.object.noun:
            met |= {(self.verb.english, self.object.noun)}
        if self.mode.name in ("is", "was") and self.subject.noun:
            met |= {(self.verb.english, self.subject.noun)}
        return met


def join(*words: str | None) -> str:
    """The words that are there, with spaces between."""
    return " ".join(word for word in words if word)


def with_s(word: str) -> str:
    """A regular English plural or third person singular."""
    word = re.sub(r"(?<=[^aeiou])y$", "ie", word)
    return word + ("es" if re.search(r"(s|x|ch|sh)$", word) else "s")


def third_person(verb: str) -> str:
    """The English third person singular of a verb and its particle: "pick up" -> "picks up"."""
    head, space, particle = verb.partition(" ")
    return ("has" if head == "have" else with_s(head)) + space + particle


def prepositional_phrase(english: str, german: str, case: Case, nominal: Nominal) -> Phrase:
    """Preposition and nominal, with the contractions of German: "in dem Park" -> "im Park"."""
    phrase = f"{german} {nominal.german[case]}"
    for full, contracted in (("in dem ", "im "), ("zu dem ", "zum "), ("zu der ", "zur ")):
        phrase = re.sub(f"^{full}", contracted, phrase)
    return Phrase(f"{english} {nominal.english}", phrase, nominal.combinations)


class Lexicon:
    """The words of demo_lexicon.yaml."""

    def __init__(self) -> None:
        words = yaml.safe_load(Path(__file__).with_name("demo_lexicon.yaml").read_text(encoding="utf-8"))
        self.names = [Nominal(name, dict.fromkeys(CASES, name)) for name in words["names"]]
        self.numerals = [Determiner(*numeral) for numeral in words["numerals"].items()]
        self.nouns = {
            name: [_noun(*noun, name) for noun in nouns.items()] for name, nouns in words["nouns"].items()
        }
        self.adjectives = [
            Adjective(english, german.split(", ")[0], german.split(", ")[-1], group["classes"])
            for group in words["adjectives"]
            for english, german in group["words"].items()
        ]
        self.verbs = [
            _verb(*verb, **group) for group in words["verbs"] for verb in group.pop("words").items()
        ]
        self.reporting_verbs = [_verb(*verb, subject=["person"]) for verb in words["reporting_verbs"].items()]
        self.modes = {name: _mode(name, **mode) for name, mode in words["modes"].items()}
        self.times = {
            name: [Phrase(*time) for time in group.items()] for name, group in words["times"].items()
        }
        self.frequency_adverbs = [Phrase(*adverb) for adverb in words["frequency_adverbs"].items()]
        self.question_words = [Phrase(*word) for word in words["question_words"].items()]
        self.conjunctions: dict[str, str] = words["conjunctions"]

    def combinations(self) -> list[tuple[str, str]]:
        """Every combination that the semantic classes allow, in the lexicon's order."""
        words = [(adjective.english, adjective.classes) for adjective in self.adjectives]
        words += [(verb.english, list(verb.object)) for verb in self.verbs]
        return [
            (word, noun.english) for word, classes in words for name in classes for noun in self.nouns[name]
        ]


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
    """A sentence, its translation, and which words meet in it."""

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
    """Makes up sentences, every one with its translation."""

    def __init__(self, lexicon: Lexicon, rng: random.Random) -> None:
        self.lexicon = lexicon
        self.rng = rng

    def chance(self, probability: float) -> bool:
        """True as often as that."""
        return self.rng.random() < probability

    def noun(self, classes: Sequence[str]) -> Noun:
        """A noun of these classes, every noun as likely as any other."""
        return self.rng.choice([noun for name in classes for noun in self.lexicon.nouns[name]])

    def phrase(
        self, noun: Noun, plural: bool, determiners: list[Determiner], described: float = 0.4
    ) -> Nominal:
        """A noun phrase, described by an adjective with that probability."""
        adjectives = [word for word in self.lexicon.adjectives if noun.semantic_class in word.classes]
        adjective = self.rng.choice(adjectives) if self.chance(described) else None
        return noun_phrase(self.rng.choice(determiners), adjective, noun, plural)

    def subject(self, verb: Verb, negated: bool, relative: bool) -> Nominal:
        """A pronoun, name or noun phrase, perhaps with a relative clause."""
        if "person" in verb.subject and self.chance(0.3):
            return self.rng.choice(PRONOUNS if self.chance(0.7) else self.lexicon.names)
        noun, plural = self.noun(verb.subject), self.chance(0.3)
        some = [] if negated else [BARE, *self.rng.sample(self.lexicon.numerals, 2)] if plural else [A, EVERY]
        nominal = self.phrase(noun, plural, DEFINITE[plural] + some, 0.4 if verb.third_person else 0)
        return self.with_relative_clause(nominal, noun) if relative and self.chance(0.15) else nominal

    def object(self, classes: Sequence[str], negated: bool) -> Nominal:
        """An object; an indefinite one carries the negation: "kein"."""
        plural = self.chance(0.3)
        if negated:
            some = [NO_PLURAL if plural else NO_SINGULAR] * 5
        else:
            some = [BARE] * 3 + self.rng.sample(self.lexicon.numerals, 2) if plural else [A] * 4 + [EVERY]
        return self.phrase(self.noun(classes), plural, DEFINITE[plural] + some)

    def with_relative_clause(self, head: Nominal, noun: Noun) -> Nominal:
        """The nominal and a relative clause whose subject or object it is."""
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
        """Which modes a clause may have."""
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
        """A clause around the verb, subject or object given, if any; only a main clause has a front."""
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
        """A prepositional phrase of one of these kinds, or none; a goal is never left out."""
        if not kinds or ("goal" not in kinds and self.chance(0.4)):
            return NOTHING
        english, german, case, semantic_class = PREPOSITIONS[self.rng.choice(kinds)]
        nominal = self.phrase(self.noun([semantic_class]), False, [*DEFINITE[False], A])
        return prepositional_phrase(english, german, case, nominal)

    def sentence(self) -> Sentence:
        """A sentence of one or two clauses."""
        kind = self.rng.choices(list(SENTENCE_KINDS), list(SENTENCE_KINDS.values()))[0]
        conjunction, tense = self.lexicon.conjunctions.get(kind, ""), self.tense()
        if kind == "statement":
            clauses = [self.clause(tense)]
            english, german = clauses[0].english(), clauses[0].german()
        elif kind == "question":
            clause = self.clause(tense, negatable=False)
            clauses = [
                replace(clause, front=self.rng.choice([NOTHING, NOTHING, *self.lexicon.question_words]))
            ]
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
            clauses = [
                self.clause(tense, verb=verb),
                self.clause(self.tense() if verb else tense, main=False),
            ]
            english = f"{clauses[0].english()} {kind} {clauses[1].english()}"
            german = f"{clauses[0].german()}, {conjunction} {clauses[1].german('last')}"
        mark = "?" if kind == "question" else "."
        met = Combinations().union(*(clause.combinations for clause in clauses))
        return Sentence(punctuated(english, mark), punctuated(german, mark), met)


def punctuated(sentence: str, mark: str) -> str:
    """The sentence with its capital and final mark; no comma closes a relative clause twice."""
    sentence = re.sub(",+", ",", sentence).rstrip(",")
    return sentence[0].upper() + sentence[1:] + mark


def word_forms(sentence: Sentence) -> set[str]:
    """The words of both sides as they are spelt."""
    return set(re.findall(r"\w+", sentence.english + " " + sentence.german))


def distinct_sentences(author: Author) -> Iterator[Sentence]:
    """Sentences without end, none with an English or a German side that was there before."""
    seen: set[str] = set()
    while True:
        sentence = author.sentence()
        if sentence.english not in seen and sentence.german not in seen:
            seen |= {sentence.english, sentence.german}
            yield sentence


def demo_corpus(seed: int = 1) -> dict[str, list[Sentence]]:
    """The sentences of every split.

    Held-out combinations occur in every sentence of test_new_combinations and nowhere else. Every word form of
    the other splits occurs in training.
    """
    rng, lexicon = random.Random(seed), Lexicon()
    held_out = {combination for combination in lexicon.combinations() if rng.random() < HELD_OUT_SHARE}
    stream = distinct_sentences(Author(lexicon, rng))
    splits = {
        "train": list(islice((s for s in stream if not s.combinations & held_out), SPLIT_SIZES["train"]))
    }
    known = set().union(*map(word_forms, splits["train"]))
    for name in ("validation", "test", "test_new_combinations"):
        new = name == "test_new_combinations"
        fitting = (s for s in stream if bool(s.combinations & held_out) == new and word_forms(s) <= known)
        splits[name] = list(islice(fitting, SPLIT_SIZES[name]))
    return splits


def write_demo_corpus(folder: Path, seed: int = 1) -> None:
    """Write `<split>.en` and `<split>.de` of every split; a file that is right already stays as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, sentences in demo_corpus(seed).items():
        for suffix, lines in (("en", [s.english for s in sentences]), ("de", [s.german for s in sentences])):
            path, content = folder / f"{split}.{suffix}", "".join(f"{line}\n" for line in lines).encode()
            if path.is_file() and path.read_bytes() == content:
                continue
            temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
            temporary.write_bytes(content)
            temporary.replace(path)


def main() -> None:
    """Command line: python -m data_module.demo_corpus FOLDER."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    write_demo_corpus(arguments.folder, arguments.seed)
    sizes = ", ".join(f"{size} pairs of {split}" for split, size in SPLIT_SIZES.items())
    print(f"{arguments.folder} holds {sizes}", file=sys.stderr)


if __name__ == "__main__":
    main()
