"""Which pairs are kept, which also occur in held-out text, and whether the account adds up."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from data_module.corpus.manifest import summary
from data_module.corpus.pairs import PairFilter, Reason, SeenPairs, hash_pairs, read_pairs
from data_module.settings import CorpusSettings, TextSource
from data_module.system.text_files import _NOT_TEXT
from tests.conftest import INVISIBLE
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


SPACES = "[ \0\t\r\v\f\x1c\x1d\x1e\x1f\x85\u2028\u2029\u2581]"
LINES = st.one_of(
    st.sampled_from([b"a", b"a b", b" a\r", b"a b c d", b"", b"\xef\xbb\xbfa", b"\xc2\xa0 \xe2\x80\x8b"]),
    st.text(max_size=6).map(lambda line: line.replace("\n", "").encode()),
    st.binary(max_size=6).map(lambda line: line.replace(b"\n", b"")),
).filter(lambda line: not line.startswith(tuple(_NOT_TEXT)))


def words(line: bytes) -> tuple[str, ...] | None:
    """Return the words of a line, none if it has no visible character, or None if it is invalid UTF-8."""
    try:
        text = line.decode()
    except UnicodeDecodeError:
        return None
    found = tuple(word for word in re.split(SPACES, text) if word)
    return () if regex.fullmatch(INVISIBLE, text) else found


@given(data=st.data())
def test_any_text_is_kept_or_dropped_for_its_first_reason(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Compare reader and filter with a loop over pairs. Lengths are in words."""
    texts = data.draw(st.lists(st.lists(st.tuples(LINES, LINES), min_size=1, max_size=8), min_size=1, max_size=3))
    settings = CorpusSettings(
        "",
        [],
        [],
        max_tokens=data.draw(st.integers(1, 4)),
        max_length_ratio=data.draw(st.sampled_from([None, 1.0, 1.5, 2.0])),
        drop_invalid_utf8=True,
        drop_duplicates=data.draw(st.booleans()),
        drop_overlap=data.draw(st.booleans()),
    )
    read = []  # words, source and target; the place; how often
    for number, lines in enumerate(texts):
        repeat = data.draw(st.integers(1, 3))
        for line, sides in enumerate(lines, 1):
            # A byte order mark is not part of a file's first line.
            sides = tuple(side.removeprefix(b"\xef\xbb\xbf") if line == 1 else side for side in sides)
            source, target = map(words, sides)
            # Only a target that alone has no text is named instead of the source.
            side = "target" if source and not target else "source"
            read.append(((source, target), f"{number}.{side}:{line}", repeat))
    validation, test = (
        {
            tuple(" ".join(side or ()) for side in pair)
            for pair, *_ in data.draw(st.lists(st.sampled_from(read), max_size=3))
        }
        for _ in range(2)
    )

    expected: dict[str | None, list[tuple[str, int]]] = {str(reason): [] for reason in Reason}
    kept_pairs, also = [], {"validation": 0, "test": 0}
    for (source, target), place, repeat in read:
        pair = (" ".join(source or ()), " ".join(target or ()))
        why = None
        if source is None or target is None:
            why = "invalid_utf8"
        elif not source or not target:
            why = "empty_side"
        elif max(len(source), len(target)) > settings.max_tokens:
            why = "too_long"
        elif settings.max_length_ratio and not (
            1 / settings.max_length_ratio <= len(source) / len(target) <= settings.max_length_ratio
        ):
            why = "length_ratio"
        else:
            also["validation"] += repeat * (pair in validation)
            also["test"] += repeat * (pair in test)
            if settings.drop_overlap and pair in validation:
                why = "overlap_with_validation"
            elif settings.drop_overlap and pair in test:
                why = "overlap_with_test"
            elif settings.drop_duplicates and pair in kept_pairs:
                why = "duplicate"
        if why is None:
            kept_pairs.append(pair)
        else:
            expected[why].append((place, repeat))

    folder = tmp_path_factory.getbasetemp()
    pair_filter = PairFilter(settings, {"validation": validation, "test": test})
    kept = []
    repeats = {place.split(".")[0]: repeat for _, place, repeat in read}
    for number, lines in enumerate(texts):
        names = [folder / f"{number}.{side}" for side in ("source", "target")]
        for name, side in zip(names, zip(*lines, strict=True), strict=True):
            name.write_bytes(b"\n".join(side) + (b"\n" if not side[-1] or data.draw(st.booleans()) else b""))
        for chunk in read_pairs(TextSource(*map(str, names)), settings):
            lengths = [
                np.array([len(line.split(" ")) if line else 0 for line in side])
                for side in (chunk.source, chunk.target)
            ]
            for i in pair_filter.keep(chunk, *lengths, repeats[str(number)]):
                kept.append((chunk.source[i], chunk.target[i]))
    assert kept == kept_pairs
    account = pair_filter.counts
    assert account["pairs_dropped"] == {
        why: {
            "pairs": sum(repeat for _, repeat in pairs),
            "first_lines": [f"{folder}/{place}" for place, _ in pairs[:5]],
        }
        for why, pairs in expected.items()
    }
    assert account["pairs_read"] == sum(repeat for *_, repeat in read)
    dropped = sum(entry["pairs"] for entry in account["pairs_dropped"].values())
    assert account["pairs_read"] == account["pairs_kept"] + dropped
    assert (account["pairs_also_in_validation"], account["pairs_also_in_test"]) == (also["validation"], also["test"])
