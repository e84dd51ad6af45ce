"""Which words of a text the vocabulary is learned from, and how often each of them counts."""

import random
import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from data_module.corpus.builder import add_casings, count_words, learn_tokenizer
from data_module.corpus.checks import check_text
from data_module.corpus.preparation import prepare
from data_module.errors import InputError
from data_module.settings import CorpusSettings, NoiseSettings, TextSource
from data_module.tokenization.training import WordCounts
from tests.data_module.conftest import write_pairs

LIMIT = "data_module.tokenization.training._MAX_COUNTED_WORDS"


def settings_of(folder: Path, train: list[TextSource], **options: object) -> CorpusSettings:
    held_out = {
        "validation": [write_pairs(folder, "validation", [("valid", "gültig"), ("", ""), ("a", "b")])],
        "test": [write_pairs(folder, "test", [("test", "Probe")])],
    }
    return CorpusSettings(str(folder / "corpus"), train, **(held_out | options))


def counts_of(settings: CorpusSettings) -> tuple[dict[str, int], str]:
    words = count_words(settings, check_text(settings), progress=False)
    return {word: count for word, count in words.counts.items() if word}, words.characters()


LONGEST = "y" * 64  # as many characters as four pieces have


def test_pairs_that_are_certain_to_be_dropped_do_not_count(tmp_path: Path) -> None:
    pairs = [
        ("b a", "c"),
        ("\udcff d", "d"),  # no UTF-8
        ("e", ""),
        ("f f f f f", "f"),  # five words are five pieces or more
        (LONGEST + "g", "g"),
        ("a a a a", LONGEST),
        ("valid", "gültig"),
        ("test", "Probe"),
        ("b  a", " c"),  # the first pair again
        ("test", "c"),  # its source alone is in the test text
        ("a", "h i j k"),  # pieces decide on the ratio of lengths
    ]
    settings = settings_of(
        tmp_path,
        [write_pairs(tmp_path, "train", pairs)],
        max_tokens=4,
        max_length_ratio=2.0,
        drop_invalid_utf8=True,
    )
    counted = {"a": 7, "b": 2, "c": 3, LONGEST: 1, "test": 2, "valid": 1, "gültig": 1, "Probe": 1}
    counted |= dict.fromkeys("hijk", 1)
    characters = set("".join(counted))
    assert counts_of(settings) == (counted, "".join(sorted(characters)))
    dropped = replace(settings, drop_overlap=True, drop_duplicates=True)
    for word in ("valid", "gültig", "Probe"):
        del counted[word]
    counted |= {"a": 6, "b": 1, "c": 2, "test": 1}
    assert counts_of(dropped) == (counted, "".join(sorted(set("".join(counted)))))


def test_a_pair_counts_once_for_each_copy_in_the_corpus(tmp_path: Path) -> None:
    """A weight changes nothing, since it may change after preparation; a prefix is a piece of its own."""
    pairs = [("ab cd", "Ef")] * 4
    sources = [
        write_pairs(tmp_path, "one", pairs, repeat=3, weight=2.5, prefix="<x>"),
        write_pairs(tmp_path, "two", pairs, weight=0.5),
    ]
    settings = settings_of(tmp_path, sources, user_symbols=["<x>"])
    assert counts_of(settings)[0] == {"ab": 16, "cd": 16, "Ef": 16}
    # With the prefix it is another pair.
    assert counts_of(replace(settings, drop_duplicates=True))[0] == {"ab": 4, "cd": 4, "Ef": 4}
    # With the prefix, the source has three words.
    assert counts_of(replace(settings, max_tokens=2))[0] == {"ab": 4, "cd": 4, "Ef": 4}
    # Half of the copies are in lower case and a quarter in upper case, of each variant. Other noise does not count.
    noise = NoiseSettings(lower_case=0.5, upper_case=0.25, typos=1.0, number=1.0)
    counted, characters = counts_of(replace(settings, noise=noise, variants=8))
    assert counted == {"ab": 12, "AB": 4, "cd": 12, "CD": 4, "Ef": 4, "ef": 8, "EF": 4}
    assert characters == "ABCDEFabcdef"


def test_casings_are_as_many_words_as_the_text_has() -> None:
    words = WordCounts()
    for number in range(1, 40):
        words.add(f"Word{'x' * number}", times=number)
    noise = NoiseSettings(lower_case=0.3, title_case=0.3, upper_case=0.4)
    add_casings(words, noise)
    assert min(words.counts.values()) >= 0
    by_word = Counter[str]()
    for word, count in words.counts.items():
        by_word[word.lower()] += count
    assert by_word == {f"word{'x' * number}": number for number in range(1, 40)}


@pytest.mark.parametrize("sentences", [10_000_000, 60])
def test_a_dropped_pair_changes_no_vocabulary(tmp_path: Path, sentences: int) -> None:
    chooser = random.Random(1)
    pairs = [(" ".join(chooser.choices("abcdefgh", k=3)), "".join(chooser.choices("ijklmn", k=4))) for _ in range(200)]
    noisy = [*pairs[:50], (" ".join(map(str, range(300))), "x"), *pairs[50:], ("中文", ""), pairs[7]]
    models = []
    for name, text in (("clean", pairs), ("noisy", noisy)):
        train = [write_pairs(tmp_path, name, list(dict.fromkeys(pairs)) if text is pairs else text)]
        settings = settings_of(tmp_path, train, vocabulary_size=40, tokenizer_sentences=sentences, drop_duplicates=True)
        models.append(learn_tokenizer(settings, check_text(settings), progress=False).model)
    assert models[0] == models[1]


@pytest.mark.parametrize("options", [{"max_tokens": 1}, {"drop_overlap": True}])
def test_text_of_which_no_pair_is_left(tmp_path: Path, options: dict[str, object]) -> None:
    reason = "too_long" if "max_tokens" in options else "overlap_with_test"
    pair = ("a b", "c") if "max_tokens" in options else ("test", "Probe")
    settings = settings_of(tmp_path, [write_pairs(tmp_path, "train", [pair] * 3)], **options)
    message = rf"^corpus\.train: no pair is left \({reason}: 3\); correct the text or relax the settings$"
    with pytest.raises(InputError, match=message):
        learn_tokenizer(settings, check_text(settings), False)
    with pytest.raises(InputError, match=message):
        prepare(settings, progress=False)


def characters_in(words: Counter[str]) -> int:
    return sum(len(word) + 1 for word in words)


def sampled(lines: list[str], limit: int) -> Counter[str]:
    """Count the words of the lines whose hashes are multiples of the least power of two that suffices."""
    for bits in range(33):
        of_these = [line for line in lines if zlib.crc32(line.encode()) % 2**bits == 0]
        lower_half = [line for line in of_these if zlib.crc32(line.encode()) % 2 ** (bits + 1)]
        if 2 * characters_in(Counter(" ".join(lower_half).split())) <= limit:
            return Counter(" ".join(of_these).split())
    raise AssertionError


@pytest.mark.parametrize("spaces", [False, True])
def test_memory_is_bounded_by_an_even_sample_of_lines_in_any_order(
    spaces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chooser = random.Random(1)
    letters = [chr(0x4E00 + number) for number in range(500)]
    lines = [(" " * spaces).join(f"{''.join(chooser.choices(letters, k=5))}" for _ in range(4)) for _ in range(4000)]
    lines += lines[:400] + ["常"] * 50
    every = Counter(" ".join(lines).split())

    def counted(lines: list[str], size: int) -> Counter[str]:
        words = WordCounts()
        for start in range(0, len(lines), size):
            words.add("\n".join(lines[start : start + size]))
        return +words.counts

    for limit in (10_000, 3000, 100):
        monkeypatch.setattr(LIMIT, limit)
        first = counted(lines, len(lines))
        assert first == (every if limit == 10_000 else sampled(lines, 12 * limit))
        assert 12 * limit / 4 < characters_in(first) < 12 * limit * 1.25 or limit == 10_000
        # Words of all frequencies and parts of the text have the same share.
        share = len(first) / len(every)
        for part in (lines[:400], lines[400:2000], lines[2000:4000]):
            words = set(" ".join(part).split())
            assert len(words & first.keys()) / len(words) == pytest.approx(share, abs=0.05)
        backwards = lines[::-1]
        shuffled = chooser.sample(lines, len(lines))
        for other, size in ((backwards, 1), (shuffled, 7), (sorted(lines), len(lines))):
            assert counted(other, size) == first


def test_a_sentence_of_any_length_without_spaces_counts(tmp_path: Path) -> None:
    chooser = random.Random(1)
    syllables = [chr(0x4E00 + number) + chr(0x5E00 + number) for number in range(100)]
    pairs = [("".join(chooser.choices(syllables, k=10_000)), "a") for _ in range(3)]
    settings = settings_of(tmp_path, [write_pairs(tmp_path, "train", pairs)], vocabulary_size=330, max_tokens=20_000)
    model = learn_tokenizer(settings, check_text(settings), progress=False)
    assert set(syllables) <= {piece.strip("\u2581") for piece in model.pieces()}
