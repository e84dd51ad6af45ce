"""The demo corpus: its text, which does not change, its lexicon and its splits."""

import os
import re
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import pytest

from data_module.demo import corpus as demo_corpus
from data_module.demo import grammar as demo_grammar
from data_module.demo.corpus import Lexicon, Sentence

LEXICON = Lexicon()
NOUNS = {noun.english: noun for nouns in LEXICON.nouns.values() for noun in nouns}
ADJECTIVES = {adjective.english: adjective for adjective in LEXICON.adjectives}
VERBS = {verb.english: verb for verb in LEXICON.verbs + LEXICON.reporting_verbs}
SHA256 = "c540e17d92fdd036363c9c071ede9d9506f5061534d8ad0ba29debec620671d8"
"""Of all files, one after another: figures of the demo are compared between versions."""


@pytest.fixture(scope="module")
def corpus() -> dict[str, list[Sentence]]:
    return demo_corpus.demo_corpus()


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
