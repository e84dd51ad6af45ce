"""The vocabulary is learned from the casings of `corpus.noise` too."""

from dataclasses import replace
from pathlib import Path

from data_module.corpus.builder import add_casings
from data_module.corpus.preparation import prepare
from data_module.settings import CorpusSettings, NoiseSettings
from data_module.tokenization.tokenizer import Tokenizer
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
