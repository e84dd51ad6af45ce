"""A parallel grammar of English and German: noun phrases, verbs and clauses, with inflection and word order.

A noun phrase (`Nominal`) and a `Clause` hold both languages, so that every English sentence has exactly one German
translation. It has gender, case, adjective endings, verb-second and verb-last order, separable and modal verbs.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Combinations = frozenset[tuple[str, str]]
"""Pairs of words used together, as English lemmas: (adjective, its noun) and (verb, its object's noun)."""
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
"""Person and number that a finite verb agrees with: I; he, she and all singulars; we, they and all plurals."""
HABEN, SEIN = ("habe", "hat", "haben"), ("bin", "ist", "sind")


class Phrase(NamedTuple):
    """Words that are not inflected, in both languages."""

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
        """Return the German form."""
        if plural:
            return self.german_plural + ("n" if case == "dative" and self.german_plural[-1] not in "ns" else "")
        return self.german_plural if self.weak and case != "nominative" else self.german


class Adjective(NamedTuple):
    """An adjective: English, German as a predicate, German stem, and the semantic classes of nouns it applies to."""

    english: str
    german: str
    stem: str
    classes: list[str]


class Determiner(NamedTuple):
    """An article, possessive or numeral, declined in German like "der", like "ein", or not at all."""

    english: str = ""
    german: str = ""
    declined_like: Literal["der", "ein", ""] = ""

    def ending(self, gender: str, case: Case) -> str:
        """Return the ending of the German form."""
        endingless = self.declined_like == "ein" and (gender, case) in EIN_WITHOUT_ENDING
        return "" if endingless or not self.declined_like else STRONG_ENDINGS[gender][case]


EIN_WITHOUT_ENDING = {("masculine", "nominative"), ("neuter", "nominative"), ("neuter", "accusative")}
BARE, A, EVERY = Determiner(), Determiner("a", "ein", "ein"), Determiner("every", "jed", "der")
NO_SINGULAR, NO_PLURAL = Determiner("a", "kein", "ein"), Determiner("", "kein", "ein")
THE, THIS = Determiner("the", "d", "der"), Determiner("this", "dies", "der")
THESE = Determiner("these", "dies", "der")
POSSESSIVES = [Determiner(*words, "ein") for words in (("my", "mein"), ("our", "unser"), ("his", "sein"))]


class Nominal(NamedTuple):
    """A subject or object: English, German in each case, and the person and number that a verb agrees with."""

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
    """Return the German definite article, which is also the relative pronoun (except "denen")."""
    return {"de": "die", "des": "das"}.get(article := "d" + STRONG_ENDINGS[gender][case], article)


def noun_phrase(determiner: Determiner, adjective: Adjective | None, noun: Noun, plural: bool = False) -> Nominal:
    """Decline a noun phrase. The determiner shows gender and case, or the adjective if the determiner cannot."""
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
        german[case] = join(article, adjective and adjective.stem + adjective_ending, noun.inflected(case, plural))
    words = join(adjective and adjective.english, noun.english_plural if plural else noun.english)
    article = "an" if determiner.english == "a" and words[0] in "aeiou" else determiner.english
    combinations = frozenset({(adjective.english, noun.english)} if adjective else ())
    agreement = PLURAL if plural else THIRD
    return Nominal(join(article, words), german, agreement, noun.english, combinations, determiner.german == "kein")


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
        """Return the finite form, without the separable prefix."""
        first_person = self.infinitive.removesuffix("n").removesuffix("e") + "e"
        return (first_person, self.third_person, self.infinitive)[agreement]


class Mode(NamedTuple):
    """A tense, modal verb or copula: its finite forms for I, he and they, and the time expressions it allows."""

    name: str
    english: Sequence[str]
    link: str
    """The word between the English auxiliary and the verb, as in "want to"."""
    german: Sequence[str]
    times: str


@dataclass(frozen=True)
class Clause:
    """A subject, a predicate and its complements. A predicative adjective is placed like an infinitive."""

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
        """Return the clause in English, with "do" only in questions and negations."""
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
        object_, recipient = (self.object and self.object.english, self.recipient and "to " + self.recipient.english)
        return join(self.front.english, predicate, object_, recipient, self.adjunct.english, self.time.english)

    def german(self, verb_position: Literal["first", "second", "last"] = "second") -> str:
        """Return the clause in German."""
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
        """Return the combinations of words in this clause."""
        parts = [part for part in (self.subject, self.object, self.recipient, self.adjunct) if part]
        combinations = Combinations().union(*(part.combinations for part in parts))
        if self.object and self.object.noun:
            combinations |= {(self.verb.english, self.object.noun)}
        if self.mode.name in ("is", "was") and self.subject.noun:
            combinations |= {(self.verb.english, self.subject.noun)}
        return combinations


def join(*words: str | None) -> str:
    """Join the words that are not empty by spaces."""
    return " ".join(word for word in words if word)


def with_s(word: str) -> str:
    """Return a regular English plural or third person singular."""
    word = re.sub(r"(?<=[^aeiou])y$", "ie", word)
    return word + ("es" if re.search(r"(s|x|ch|sh)$", word) else "s")


def third_person(verb: str) -> str:
    """Return the English third person singular of a verb with its particle: "pick up" -> "picks up"."""
    head, space, particle = verb.partition(" ")
    return ("has" if head == "have" else with_s(head)) + space + particle


def prepositional_phrase(english: str, german: str, case: Case, nominal: Nominal) -> Phrase:
    """Return a prepositional phrase, with the contractions of German: "in dem Park" -> "im Park"."""
    phrase = f"{german} {nominal.german[case]}"
    for full, contracted in (("in dem ", "im "), ("zu dem ", "zum "), ("zu der ", "zur ")):
        phrase = re.sub(f"^{full}", contracted, phrase)
    return Phrase(f"{english} {nominal.english}", phrase, nominal.combinations)
