"""Lines in another form than the training text: what is said, and how much evidence it needs."""

import random

import pytest

from data_module.system.files import misshapen
from data_module.tokenization.text_form import SHAPE, SideForm, difference, form_notes
from pipeline.inference.options import Prefixes
from pipeline.inference.text_io import Defects, SentenceWarnings
from tests.conftest import sentences

MOLECULES = ["CC(=O)Oc1ccccc1C(=O)O", "CN1C=NC2=C1C(=O)N(C(=O)N2C)C", "CC(C)Cc1ccc(cc1)C(C)C(=O)O"]
SPACED = [" ".join(line) for line in MOLECULES]
WORDS = sentences(60, 3)
TAGGED = [f"<{random.Random(i).choice('NV')}> {line}" for i, line in enumerate(WORDS)]
PARTS = [line.replace(" ", "@@ ", 1) for line in WORDS]
SPACES, NO_SPACES = "spaces where training text had none", "no spaces where training text had them"
NO_TAG, JOIN, SPLIT = "without a first word that each training", r"words in parts (@@), which", "no words in parts (@@)"


def form_of(source: list[str], target: list[str]) -> dict[str, object]:
    sides = SideForm(), SideForm()
    for side, lines in zip(sides, (source, target), strict=True):
        side.add(lines[:7])
        side.add(lines[7:])
    return {"source": sides[0].values(), "target": sides[1].values()}


def said(training: list[str], lines: list[str], is_target: bool = False) -> list[str]:
    others = ["a b"] * 30
    form = form_of(others, training) if is_target else form_of(training, others)
    assert not misshapen(form, SHAPE)
    warnings = SentenceWarnings(Prefixes(), None)
    for number, line in enumerate(lines, 1):
        warnings.add(number, Defects(differs=difference(form, is_target, line)))
    return warnings.texts()


@pytest.mark.parametrize("is_target", [False, True])
@pytest.mark.parametrize(
    ("training", "lines", "words"),
    [
        (MOLECULES * 9, SPACED, SPACES),
        (MOLECULES * 9, SPACED[:1], SPACES),  # 21 symbols
        (SPACED * 9, MOLECULES, NO_SPACES),
        ([" ".join(line.replace(" ", "")) for line in WORDS], ["house", "under", "likes", "small"], NO_SPACES),
        (WORDS, [" ".join(line) for line in WORDS], SPACES),
        (TAGGED, WORDS, NO_TAG),
        ([f"translate {line}" for line in WORDS], WORDS, NO_TAG),
        (WORDS, PARTS, JOIN),
        (PARTS, WORDS, SPLIT),
    ],
)
def test_another_form_is_said_once_with_lines(
    training: list[str], lines: list[str], words: str, is_target: bool
) -> None:
    [text] = said(training, ["", *lines], is_target)
    assert text.startswith("line 2: " if len(lines) == 1 else f"{len(lines)} lines, ")
    assert words in text
    assert said(training, training, is_target) == []


@pytest.mark.parametrize(
    ("training", "lines"),
    [
        (SPACED * 9, ["CCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCC"]),  # a single word
        (SPACED * 9, [*SPACED, *MOLECULES]),  # not most of the lines
        (MOLECULES * 9, ["C C ( = O )"]),
        (TAGGED, ["the dog sees a cat"]),
        (WORDS, ["Donaudampfschifffahrt", "https://example.org/a/b", "dog", "cat", "Internationalisierung"] * 9),
        (WORDS, ["@@ -1,3 +1,4 @@ the dog sees a cat"] * 9),  # of a patch
        (WORDS, ["a b"]),
        (MOLECULES * 9, ["", "\u00a0"]),
        (WORDS[:9], WORDS),
    ],
)
def test_little_evidence_says_nothing(training: list[str], lines: list[str]) -> None:
    assert said(training, lines) == []


def test_tags_are_first_words_of_all_lines() -> None:
    tags = [form_of(lines, lines)["source"]["tags"] for lines in (TAGGED, [*TAGGED, "<N>"], WORDS, MOLECULES * 9)]  # type: ignore[index]
    assert tags == [["<N>", "<V>"], [], [], []]
    assert form_of([">>de<< a"] * 19, ["a b"])["source"]["tags"] == []  # type: ignore[index]


def test_notes_on_training_text() -> None:
    assert [*form_notes(form_of(TAGGED, WORDS)), *form_notes(form_of(TAGGED, TAGGED))] == []
    [exchanged] = form_notes(form_of(WORDS, TAGGED))
    assert exchanged.endswith("source and target are exchanged")
    assert "<N> or the like begins each target line and no source line" in exchanged
    [parts] = form_notes(form_of(WORDS, PARTS))
    assert "of its target lines have words in parts (@@)" in parts
