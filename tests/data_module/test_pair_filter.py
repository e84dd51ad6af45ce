"""Which pairs are kept, which also occur in held-out text, and whether the account adds up."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_module.corpus.manifest import summary
from data_module.corpus.pairs import PairFilter, Reason, SeenPairs, hash_pairs, read_pairs
from data_module.settings import CorpusSettings
from tests.data_module.conftest import contents, dropped, made, pairs_of_text, write_pairs


@pytest.mark.parametrize(
    "bounds", [[1, 1, 10, 500, 3000], [2000, 2300, 2350, 2360, 2365, 2367, 2368, 2369, 2370, 2371]]
)
def test_seen_pairs_equal_a_set(bounds: list[int]) -> None:
    """Test chunks of increasing size, and of decreasing size, which are merged later."""
    random_hashes = np.random.default_rng(1).integers(0, 3000, size=5000).astype(np.uint64)
    seen, reference, memory = [], [], set()
    pairs = SeenPairs()
    for chunk in np.split(random_hashes, bounds):
        seen += pairs.add(chunk).tolist()
        for value in chunk.tolist():
            reference.append(value in memory)
            memory.add(value)
    assert seen == reference


def test_different_pairs_have_different_hashes() -> None:
    pairs = [("ab", "c"), ("a", "bc"), ("a b", "c"), ("a", "b c"), ("c", "ab"), ("", "abc"), ("abc", "")]
    assert len(set(hash_pairs(pairs).tolist())) == len(pairs)
    assert np.array_equal(hash_pairs(pairs), hash_pairs(pairs))


def test_test_text_is_compared_and_not_stored(
    settings: CorpusSettings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good, validation, test = pairs_of_text(40, 9), pairs_of_text(20, 2), pairs_of_text(10, 7)
    other_translation = (test[2][0], "the cat")  # its source alone is no reason
    train = [*good, test[0], (f" {test[1][0]}  ", test[1][1]), other_translation, validation[0], ("", "")]
    compared = replace(
        settings,
        train=[replace(write_pairs(tmp_path, "mixed", train), repeat=2)],
        # A pair in both texts counts in both, and is dropped for the first reason.
        test=[write_pairs(tmp_path, "test", [*test, ("", "")]), write_pairs(tmp_path, "more", validation[:1])],
    )
    manifest = made(compared)
    assert (manifest["train"]["pairs_also_in_validation"], manifest["train"]["pairs_also_in_test"]) == (2, 6)
    assert manifest["train"]["pairs_kept"] == 2 * 44
    assert "6 training pairs also occur in the test text; corpus.drop_overlap: true drops them" in caplog.text
    assert not [name for name in contents(compared.folder) if name.startswith("test")]
    assert f"{tmp_path}/test.de" in [entry["file"] for entry in manifest["source_files"]]

    manifest = made(replace(compared, drop_overlap=True), force=True)
    assert dropped(manifest["train"]) == {"empty_side": 2, "overlap_with_validation": 2, "overlap_with_test": 4}
    assert "6 training pairs also occur in the test text and were dropped" in caplog.text


def test_the_summary_adds_up(settings: CorpusSettings, tmp_path: Path) -> None:
    odd = [("", "the")] * 1500 + [("cat " * 100, "the")] * 2 + pairs_of_text(5, 9)
    manifest = made(replace(settings, train=[write_pairs(tmp_path, "odd", odd), *settings.train], max_tokens=60))
    train, validation = summary(manifest).splitlines()
    name = f"{tmp_path}/odd.en"
    assert train == (
        f"train: 1,907 pairs read, 405 kept, 1,502 dropped: 1,500 empty side ({name}:1, {name}:2, {name}:3, "
        f"and 1,497 more); 2 too long ({name}:1501, {name}:1502)"
    )
    assert validation == "validation: 20 pairs read, 20 kept, 0 dropped"
    repeated = replace(write_pairs(tmp_path, "one", [("", "the"), *pairs_of_text(5, 9)]), repeat=5)
    again = summary(made(replace(settings, train=[repeated]), force=True))
    assert f"5 empty side ({tmp_path}/one.en:1, and 4 more)" in again


PAIRS = [
    ("a b", "c d", None),
    ("\udcff", "", "invalid_utf8"),
    ("", "a b c d e", "empty_side"),
    ("a", "\u200b", "empty_side"),
    ("a b c d e", "a", "too_long"),
    ("a", "a b c d e", "too_long"),
    ("a b c", "v", "length_ratio"),
    ("a b", "a b c d", None),
    ("v", "a b c", "length_ratio"),
    ("v v", "w w", "overlap_with_validation"),
    ("t t", "u u", "overlap_with_test"),
    (" a  b ", "c\td", "duplicate"),
    *[("", "b", "empty_side")] * 5,
]
"""Of one source and target, whose reasons are not the only ones."""


@pytest.mark.parametrize("drops", [True, False])
def test_a_pair_counts_under_its_first_reason(tmp_path: Path, drops: bool) -> None:
    """With lengths in words."""
    text = write_pairs(tmp_path, "train", [pair for *pair, _ in PAIRS])
    options = {"drop_invalid_utf8": True, "drop_duplicates": drops, "drop_overlap": drops}
    settings = CorpusSettings("", [], [], max_tokens=4, max_length_ratio=2.0, **options)
    held_out = {"validation": {("v v", "w w"), ("v", "a b c")}, "test": {("t t", "u u"), ("v v", "w w")}}
    pair_filter, kept = PairFilter(settings, held_out), []
    for chunk in read_pairs(text, settings):
        sides = chunk.source, chunk.target
        lengths = [np.array([len(line.split()) for line in side]) for side in sides]
        kept += pair_filter.keep(chunk, *lengths, 3).tolist()
    why = [reason if drops or not (reason or "").startswith(("overlap", "dup")) else None for *_, reason in PAIRS]
    assert kept == [place for place, reason in enumerate(why) if reason is None]
    # The target is named where it alone has no text.
    names = [text.target if number == 4 else text.source for number in range(len(PAIRS) + 1)]
    first = {
        reason: [f"{names[number]}:{number}" for number, one in enumerate(why, 1) if one == reason] for reason in Reason
    }
    counts = pair_filter.counts
    assert counts["pairs_dropped"] == {
        str(reason): {"pairs": 3 * len(lines), "first_lines": lines[:5]} for reason, lines in first.items()
    }
    assert (counts["pairs_read"], counts["pairs_kept"]) == (3 * len(PAIRS), 3 * len(kept))
    assert (counts["pairs_also_in_validation"], counts["pairs_also_in_test"]) == (3, 6)
