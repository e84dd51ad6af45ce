from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise
from random import Random

import numpy as np
import pytest

from data_module.tokenization import encoders as bpe_dropout
from data_module.tokenization.encoders import DropoutEncoder
from data_module.tokenization.tokenizer import Tokenizer, normalize_white_space
from tests.conftest import train_tokenizer

SYLLABLES = ["ba", "bab", "le", "ten", "ent", "ster", "in", "über", "ß", "É", "ing", "tion", "o", "aa"]
UNSPACED = "人工智能模型将一种语言翻译成另一种语言。机器翻译的质量在过去几年里有了很大的提高"


def _text() -> list[str]:
    random = np.random.default_rng(3)
    words = ["".join(random.choice(SYLLABLES, size=random.integers(1, 6))) for _ in range(1500)]
    spaced = [" ".join(random.choice(words, size=8)) for _ in range(500)]
    unspaced = ["".join(random.choice(list(UNSPACED), size=random.integers(1, 180))) for _ in range(200)]
    mixed = [f"{word}{random.choice(list(UNSPACED))}, {word.upper()} ▅ 12.5%" for word in words[:100]]
    marked = [f"<b>{word}</b>{word} {word}tion{word}" for word in words[:50]]
    return [*spaced, *unspaced, *mixed, *marked, "aaaaaaa aaaaaaaaaaa " * 5]


def _words(lines: Iterable[str]) -> list[str]:
    return [word for line in lines for word in normalize_white_space(line).split(" ")]


KINDS: dict[str, dict[str, object]] = {
    "cased": {},
    "lowercase": {"lowercase": True},
    "symbols": {"user_symbols": ["<b>", "tion", "le<"], "byte_fallback": True, "lowercase": True},
}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    options = KINDS[request.param]
    size = 400 + 256 * options.get("byte_fallback", False)
    return train_tokenizer(_text(), size, **options)


def _sample(tokenizer: Tokenizer, words: list[str], dropout: float, seed: int = 1) -> list[tuple[int, ...]]:
    return [tuple(row.tolist()) for row in DropoutEncoder(tokenizer, dropout).encode(words, seed)]


def _plain(tokenizer: Tokenizer, words: list[str]) -> list[tuple[int, ...]]:
    return [tuple(row.tolist()) for row in tokenizer.encode(words)]


def _distribution(tokenizer: Tokenizer, word: str, dropout: float) -> dict[tuple[int, ...], float]:
    """Algorithm 1 by exact enumeration: the probability of every segmentation of one word."""
    processor = tokenizer._processor
    ids = {piece: i for i, piece in enumerate(tokenizer.pieces())}
    result: dict[tuple[int, ...], float] = defaultdict(float)

    def visit(split: tuple[str, ...], probability: float) -> None:
        merges = [
            (-processor.get_score(ids[left + right]), position)
            for position, (left, right) in enumerate(pairwise(split))
            if left + right in ids
        ]
        # The best merge that is left in is applied: all better ones were left out.
        for _, position in sorted(merges):
            merged = split[position] + split[position + 1]
            visit((*split[:position], merged, *split[position + 2 :]), probability * (1 - dropout))
            probability *= dropout
        result[tuple(ids[piece] for piece in split)] += probability

    visit(("\u2581", *word), 1.0)
    return dict(result)


def test_without_dropout_every_word_is_segmented_as_by_sentencepiece(tokenizer: Tokenizer) -> None:
    words = list(dict.fromkeys(_words(_text())))
    unseen = ["".join(words[i : i + 3])[::-1] for i in range(500)]
    for lines in (words, unseen, list(map(normalize_white_space, _text()))):
        assert _sample(tokenizer, lines, 0.0) == _plain(tokenizer, lines)
    assert _sample(tokenizer, [], 0.1) == []


def test_words_that_cannot_be_merged_keep_their_plain_segmentation(tokenizer: Tokenizer) -> None:
    words = ["", "ba", "baЯba", "Я", "ЯЯ", "a▅b", "▅", "ten", "<B>le", "ba<b>ba", "b\u00a0a", "😀ten", "lester" * 100]
    merged = {"ba", "ten"} if tokenizer.user_symbols else {"ba", "ten", "<B>le", "ba<b>ba"}
    for dropout in (0.0, 1.0):
        sampled, plain = _sample(tokenizer, words, dropout), _plain(tokenizer, words)
        for word, row, expected in zip(words, sampled, plain, strict=True):
            if word in merged and dropout:
                assert len(row) == len(word) + 1
            else:
                assert row == expected


@pytest.mark.parametrize("dropout", [0.1, 0.5])
@pytest.mark.parametrize("word", ["babtent", "aaaaaa", "语言。机器"])
def test_segmentations_have_the_distribution_of_algorithm_1(tokenizer: Tokenizer, word: str, dropout: float) -> None:
    count, draw = 5_000, Random(1).random
    expected = _distribution(tokenizer, word, dropout)
    assert sum(expected.values()) == pytest.approx(1)
    encoder = DropoutEncoder(tokenizer, dropout)
    seen = Counter(tuple(encoder._segment(["\u2581", *word], draw)) for _ in range(count))
    assert set(seen) <= set(expected)
    for split, probability in expected.items():
        deviation = np.sqrt(count * probability * (1 - probability))
        assert abs(seen[split] - count * probability) <= 4.5 * deviation + 1


def test_a_frequent_word_has_some_segmentations_and_its_occurrences_take_any_of_them(tokenizer: Tokenizer) -> None:
    word, count = "babtentinster", 8_000
    times = Counter(_sample(tokenizer, [f"ba {word}"] * count, 0.5))
    assert 10 <= len(times) <= bpe_dropout.MAX_SEGMENTATIONS**2
    words = Counter(row for row in _sample(tokenizer, [word] * count, 0.5))
    assert 10 <= len(words) <= bpe_dropout.MAX_SEGMENTATIONS
    assert min(words.values()) > 0.8 * count / bpe_dropout.MAX_SEGMENTATIONS
