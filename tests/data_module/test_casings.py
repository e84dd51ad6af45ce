"""Vocabularies of text with the casings of `corpus.noise`: counts, and words that split alike in all casings."""

import random
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from data_module.corpus.builder import add_casings
from data_module.corpus.preparation import prepare
from data_module.demo.corpus import distinct_sentences
from data_module.demo.sentences import Author, Lexicon
from data_module.errors import InputError
from data_module.noise.noise import CASINGS, with_casing
from data_module.settings import CorpusSettings, NoiseSettings
from data_module.tokenization.casings import casing_groups, train_on_casings
from data_module.tokenization.tokenizer import Tokenizer, train_on_words
from data_module.tokenization.word_counts import WordCounts
from tests.data_module.test_preparation import pairs_of_text, write_pairs


def counted(**counts: int) -> WordCounts:
    words = WordCounts()
    for word, count in counts.items():
        words.add(word, count)
        words.add_characters(word)
    return words


def test_counts_by_hand() -> None:
    words = counted(the=100, House=40, über=10, rare=4, A=100)
    words.add("<b>tag", 100)
    before = set(words.characters())
    add_casings(words, NoiseSettings(lower_case=0.05, upper_case=0.1), frozenset(["<b>"]))
    # Of 40, 2 are in lower case and 4 in upper case; "rare" would be there 0.4 times; "A" is upper-case already.
    expected = {"the": 100, "THE": 10, "House": 40, "house": 2, "HOUSE": 4, "über": 10, "ÜBER": 1, "rare": 4}
    assert words.counts == {**expected, "A": 100, "a": 5, "<b>tag": 100}
    assert set(words.characters()) - before == set("THEOUSÜBRa") - before


def test_without_casings_nothing_changes() -> None:
    words = counted(the=100, House=40)
    add_casings(words, NoiseSettings(typos=0.5, web_address=0.5))
    assert words.counts == {"the": 100, "House": 40}


def test_upper_case_has_pieces_of_its_own(tmp_path: Path) -> None:
    """The text has all upper-case letters, but words in lower case."""
    letters = " ".join("ABCDEFGHIJKLMNOPQRSTUVWXYZÜ")
    train = write_pairs(tmp_path, "train", [*pairs_of_text(400, 1), (letters, letters)])
    validation = write_pairs(tmp_path, "validation", pairs_of_text(5, 2))
    sentence = "the red house sees a blue tree"
    lengths = {}
    for share in (0.0, 0.1):
        settings = CorpusSettings(str(tmp_path / f"corpus {share}"), [train], [validation], vocabulary_size=116)
        prepare(replace(settings, noise=NoiseSettings(upper_case=share, typos=0.01)), progress=False)
        tokenizer = Tokenizer.load(Path(settings.folder) / "tokenizer.model")
        lengths[share] = [len(ids) for ids in tokenizer.encode([sentence, sentence.upper()])]
    assert lengths[0.0][1] >= len(sentence.replace(" ", ""))  # letter by letter
    assert lengths[0.1][1] < 0.7 * lengths[0.0][1]


def test_a_tokenizer_that_lower_cases_is_the_same(tmp_path: Path) -> None:
    train = write_pairs(tmp_path, "train", pairs_of_text(400, 1))
    validation = write_pairs(tmp_path, "validation", pairs_of_text(5, 2))
    models = []
    for share in (0.0, 0.1):
        settings = CorpusSettings(str(tmp_path / f"corpus {share}"), [train], [validation], vocabulary_size=60)
        prepare(replace(settings, lowercase=True, noise=NoiseSettings(upper_case=share, typos=0.01)), progress=False)
        models.append((Path(settings.folder) / "tokenizer.model").read_bytes())
    assert models[0] == models[1]


NOISE = NoiseSettings(lower_case=0.1, title_case=0.1, upper_case=0.1)


def text_with_casings(*more: str, count: int = 20) -> WordCounts:
    words = WordCounts()
    sentences = distinct_sentences(Author(Lexicon(), random.Random(1)))
    for sentence in islice(sentences, 500):
        for line in (sentence.english, sentence.german):
            words.add(line, 10)
            words.add_characters(line)
    for word in more:
        words.add(word, count)
        words.add_characters(word)
    add_casings(words, NOISE)
    return words


def cuts(tokenizer: Tokenizer, words: list[str]) -> list[list[int]]:
    """Return the number of characters of each piece of each word."""
    pieces = tokenizer.pieces()
    return [[len(pieces[i]) for i in row] for row in tokenizer.encode(words)]


@pytest.mark.parametrize(("rarest", "unlike"), [(0.0, 0.0), (0.01, 0.02)])
def test_words_split_alike_in_all_casings(rarest: float, unlike: float) -> None:
    """Where no casing is too rare, all of them, but for the last merge, whose casings may not all have room."""
    words = text_with_casings("McDonald's", "Straße")
    tokenizer = Tokenizer(train_on_casings(words, 500, rarest))
    last = [piece for piece in tokenizer.pieces() if len(piece) > 1][-1].lower()
    plain = [word for word in words.counts if word == word.lower() and len(word) > 1 and last not in word]
    expected = cuts(tokenizer, plain)
    assert 1.2 < np.mean([len(row) for row in expected]) < 0.7 * np.mean(list(map(len, plain)))
    for kind in CASINGS:
        same = [word for word in plain if len(with_casing(word, kind)) == len(word)]
        assert len(same) >= 0.98 * len(plain)  # "ß" is two letters in upper case.
        cased = cuts(tokenizer, [with_casing(word, kind) for word in same])
        different = sum(one != other for one, other in zip(cased, cuts(tokenizer, same), strict=True))
        assert different <= unlike * len(same)
    learned_of_cased_text = Tokenizer(train_on_words(words, 500))
    upper = cuts(learned_of_cased_text, [word.upper() for word in plain])
    assert sum(map(len, upper)) > 1.1 * sum(map(len, cuts(learned_of_cased_text, plain)))


def test_lower_case_is_split_as_sentencepiece_would() -> None:
    """The merges are those that sentencepiece learns from the text in lower case, in the same order."""
    words = text_with_casings()
    tokenizer = Tokenizer(train_on_casings(words, 500, 0.0))
    lower = WordCounts()
    for word, count in words.counts.items():
        lower.add(word.lower(), count)
        lower.add_characters(word.lower())
    merged = {piece.lower() for piece in tokenizer.pieces() if len(piece) > 1} - {"<pad>", "<unk>", "<s>", "</s>"}
    # The last merge may have too few casings left to be in the vocabulary; words with it are left out.
    reference = Tokenizer(train_on_words(lower, 5 + len(lower.characters()) + len(merged)))
    assert set(reference.pieces()) >= merged
    known = set(tokenizer.pieces())
    whole = [w for w in lower.counts if w and known.issuperset(reference.pieces()[i] for i in reference.encode([w])[0])]
    assert len(whole) > 50
    assert cuts(tokenizer, whole) == cuts(reference, whole)


def test_the_size_is_exact_and_text_comes_back() -> None:
    words = text_with_casings("caf\u00e9", "\u0130stanbul", "\u03a3\u03af\u03c3\u03c5\u03c6\u03bf\u03c2", "z<br>Upper")
    sentences = list(words.counts)
    for size in (150, 499, 500):
        tokenizer = Tokenizer(train_on_casings(words, size, 0.05))
        assert tokenizer.vocabulary_size == len(set(tokenizer.pieces())) == size
        assert tokenizer.decode(tokenizer.encode(sentences)) == sentences
        assert not any((ids == tokenizer.unk_id).any() for ids in tokenizer.encode(sentences))


def test_bytes_and_user_symbols() -> None:
    words = text_with_casings("z<br>Upper", "<br>")
    words.add("\U0001f600 rare\u0416", 3)
    words.add_characters("\U0001f600\u0416")
    tokenizer = Tokenizer(train_on_casings(words, 700, 0.05, byte_fallback=True, user_symbols=["<br>"]))
    assert tokenizer.user_symbols == ["<br>"]
    assert "<br>" in [tokenizer.pieces()[i] for i in tokenizer.encode(["z<br>Upper"])[0]]
    assert tokenizer.decode(tokenizer.encode(["\U0001f600 \u0416 z<br>Upper"])) == ["\U0001f600 \u0416 z<br>Upper"]
    assert "\u0416" not in tokenizer.pieces()  # three occurrences


def test_the_most_frequent_casing_comes_first() -> None:
    """Beside 4 special ids, the space and 4 letters there is room for one merge, `ab` or a space with `a`."""
    merge = Tokenizer(train_on_casings(counted(ab=30, AB=10), 10, 0.01)).pieces()[4]
    assert merge in ("ab", "\u2581a")


def test_characters_with_byte_fallback() -> None:
    """A letter has a piece of its own if 20 words have it, or its lower case if 20 words have that in some casing."""
    words = counted(word=100, WORD=100, é=25, É=3, ö=5, Ö=20, ž=5, Ž=5)
    pieces = Tokenizer(train_on_casings(words, 274, 0.01, byte_fallback=True)).pieces()
    assert {"é", "ö", "Ö"} <= set(pieces)
    assert not {"É", "ž", "Ž"} & set(pieces)


def test_letters_of_user_symbols_are_no_casings() -> None:
    """The longest symbol is matched first, so that in `x<B>Ay` no `Ay` is left."""
    words = text_with_casings("x<B>Ay", "x<B>Uv<B>UV", "The<B>The<B>THE", count=2000)
    tokenizer = Tokenizer(train_on_casings(words, 500, 0.01, user_symbols=["<B>", "<B>A"]))
    pieces = tokenizer.pieces()
    assert "Ay" not in pieces
    assert {"Uv", "UV"} <= set(pieces)
    assert len(set(pieces)) == 500  # Were `The` a merge of its own beside a casing of `the`, it would be there twice.
    assert [pieces[i] for i in tokenizer.encode(["x<B>Ay"])[0]][-2:] == ["<B>A", "y"]


def test_sizes_that_do_not_fit() -> None:
    words = text_with_casings()
    with pytest.raises(
        InputError, match=r"30000 pieces are more than the training text allows; the largest .* (\d+)$"
    ) as error:
        train_on_casings(words, 30000, 0.01)
    largest = int(str(error.value).split()[-1])
    assert Tokenizer(train_on_casings(words, largest, 0.01)).vocabulary_size == largest
    with pytest.raises(
        InputError, match=r"50 is too small for the \d+ distinct characters .* set at least (\d+)"
    ) as error:
        train_on_casings(words, 50, 0.01)
    least = int(str(error.value).split("at least ")[1].split(",")[0])
    assert Tokenizer(train_on_casings(words, least, 0.01)).vocabulary_size == least


def test_groups_by_hand() -> None:
    pieces = [
        "<pad>",
        "<unk>",
        "<s>",
        "</s>",
        "<S>",
        "<0x41>",
        "\u2581The",
        "the",
        "\u2581the",
        "\u2581THE",
        "THe",
        "A",
        "7",
    ]
    group, casing = casing_groups(pieces, ["<S>"])
    assert group.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 6, 6, 7, 8, 9]
    lower, upper, capital, title, mixed = range(5)
    assert casing.tolist() == [lower] * 6 + [title, lower, lower, upper, mixed, capital, lower]
