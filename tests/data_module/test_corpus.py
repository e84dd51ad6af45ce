import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_module.corpus import store
from data_module.corpus.manifest import differences
from data_module.corpus.store import (
    MAX_TOKENS,
    TokenStore,
    TokenStoreWriter,
    hash_pairs,
    lengths_with_eos,
    open_corpus,
    store_prefix,
    token_type,
)
from data_module.errors import InputError
from data_module.settings import CorpusSettings
from tests.data_module.conftest import made

SENTENCES = [[5, 6, 7], [], [65_535], [8, 9]]


def _append(writer: TokenStoreWriter, sentences: list[list[int]]) -> None:
    tokens = np.array([piece for ids in sentences for piece in ids], dtype=np.int64)
    writer.append_flat(tokens, np.array(list(map(len, sentences)), dtype=np.int64))


def _write(prefix: Path, dtype: type = np.uint16) -> TokenStore:
    with TokenStoreWriter(prefix, np.dtype(dtype)) as writer:
        for part in (SENTENCES[:2], [], SENTENCES[2:]):
            _append(writer, part)
    return TokenStore(prefix)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_reads_what_was_appended(tmp_path: Path, dtype: type) -> None:
    store = _write(tmp_path / "train.source", dtype)
    assert [store[i].tolist() for i in range(len(store))] == SENTENCES
    assert store.tokens.dtype == dtype
    assert (store.lengths.dtype, store.lengths.tolist()) == (np.uint16, [3, 0, 1, 2])
    assert lengths_with_eos(store).tolist() == [4, 1, 2, 3]
    assert (store.offsets.dtype, store.offsets.tolist()) == (np.int64, [0, 3, 3, 4, 6])
    with pytest.raises(IndexError):
        store[4]


def test_store_is_mapped_and_pickles_as_its_path(tmp_path: Path) -> None:
    store = _write(tmp_path / "train.source")
    assert not store.tokens.flags.writeable
    assert isinstance(store.tokens.base, np.memmap)
    data = pickle.dumps(store)
    assert len(data) < 1000
    assert pickle.loads(data)[0].tolist() == SENTENCES[0]  # noqa: S301


def test_the_hash_is_that_of_the_training_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ids, their sentences, sides, order and variants, in blocks of any size."""
    pairs = [([1, 2], [3]), ([4], [5, 6]), ([7], [8])]
    changed = {
        "order": [pairs[1], pairs[0], pairs[2]],
        "alignment": [([1, 2], [8]), pairs[1], ([7], [3])],
        "sides": [pair[::-1] for pair in pairs],
        "boundary": [([1], [3]), ([2, 4], [5, 6]), pairs[2]],
        "one id": [*pairs[:2], ([7], [9])],
        "fewer": pairs[:2],
    }

    def hash_of(*variants: list[tuple[list[int], list[int]]]) -> str:
        for number, variant in enumerate(variants):
            for side, sentences in zip(("source", "target"), zip(*variant, strict=True), strict=True):
                with TokenStoreWriter(store_prefix(tmp_path, "train", side, number), np.dtype(np.uint16)) as writer:
                    _append(writer, list(sentences))
        return hash_pairs(tmp_path, len(variants))

    hashes = {hash_of(*both) for both in ((pairs,), (pairs, pairs), *((one,) for one in changed.values()))}
    hashes |= {hash_of(pairs, one) for one in changed.values()}
    assert len(hashes) == 2 + 2 * len(changed)
    whole = hash_of(pairs, changed["order"])
    monkeypatch.setattr(store, "_BLOCK", 2)
    assert hash_of(pairs, changed["order"]) == whole


def test_repeat_from_appends_the_sentences_again(tmp_path: Path) -> None:
    with TokenStoreWriter(tmp_path / "s", np.dtype(np.uint16)) as writer:
        _append(writer, SENTENCES)
        writer.repeat_from(1, 2, block=2)
        assert (len(writer), writer.num_tokens, writer.longest) == (10, 12, 3)
    store = TokenStore(tmp_path / "s")
    assert [store[i].tolist() for i in range(10)] == SENTENCES + SENTENCES[1:] * 2


def test_a_sentence_longer_than_16_bits_is_refused(tmp_path: Path) -> None:
    with TokenStoreWriter(tmp_path / "s", np.dtype(np.uint16)) as writer:
        _append(writer, [[1] * MAX_TOKENS])
        with pytest.raises(ValueError, match="65535 tokens"):
            _append(writer, [[1] * (MAX_TOKENS + 1)])


def test_smallest_type_that_holds_the_vocabulary() -> None:
    assert token_type(65_536) == np.uint16
    assert token_type(65_537) == np.uint32


def first_sentence(settings: CorpusSettings) -> np.ndarray:
    return open_corpus(Path(settings.folder), "train").source[0]


@pytest.mark.parametrize(
    ("name", "spoil", "use", "message"),
    [
        ("train.source.tokens.npy", lambda whole: whole[:-1], first_sentence, "incomplete, .* bytes, not .*--force"),
        ("train.source.tokens.npy", None, made, "the corpus is incomplete, this file is missing"),
        ("train.source.tokens.npy", lambda whole: bytes(len(whole)), first_sentence, "cannot open the corpus"),
        ("tokenizer.model", lambda whole: whole.replace("\u2581".encode(), "\u2582".encode(), 1), first_sentence,
         "not the tokenizer that the corpus was made with"),
    ],
)  # fmt: skip
def test_a_damaged_corpus_is_detected_and_can_be_rebuilt(
    settings: CorpusSettings,
    name: str,
    spoil: Callable[[bytes], bytes] | None,
    use: Callable[[CorpusSettings], object],
    message: str,
) -> None:
    made(settings)
    path = Path(settings.folder) / name
    whole = path.read_bytes()
    path.unlink()
    if spoil:
        path.write_bytes(spoil(whole))
    with pytest.raises(InputError, match=rf"{name}: .*{message}"):
        use(settings)
    made(settings, force=True)
    assert path.read_bytes() == whole


def test_no_corpus_and_no_corpus_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent: no such corpus; run"):
        open_corpus(tmp_path / "absent", "train")
    with pytest.raises(InputError, match="not a corpus"):
        open_corpus(tmp_path, "train")


def test_a_link_to_a_corpus_is_kept(settings: CorpusSettings, tmp_path: Path) -> None:
    there, link = tmp_path / "disk" / "corpus", tmp_path / "link"
    there.parent.mkdir()
    link.symlink_to(there)
    for most in (100, 101, 102):
        made(replace(settings, folder=str(link), max_tokens=most), force=True)
    assert link.readlink() == there
    assert json.loads((there / "manifest.json").read_text())["settings"]["max_tokens"] == 102
    assert not list(tmp_path.glob(".link.*"))
    assert not list(there.parent.glob(".corpus.*"))


FILES = {name: {"file": name, "bytes": 1, "sha256": name} for name in ("one", "two", "three")}


@pytest.mark.parametrize(
    ("had", "wanted", "expected"),
    [
        (
            {"source_files": [FILES["one"], FILES["two"]]},
            {"source_files": [FILES["two"], FILES["three"]]},
            ["three is new", "one is gone"],
        ),
        (
            {"settings": {"names": ["ä", 2], "test": [{"tsv": "3"}]}},
            {"settings": {"names": ["ö"], "seed": 4}},
            ['corpus.names was ["ä", 2], now ["ö"]', "corpus.seed was null, now 4", "corpus.test: no longer 3"],
        ),
        ({}, {"settings": {"seed": 4}}, ['corpus was null, now {"seed": 4}']),
    ],
)
def test_differences_name_what_is_new_and_missing(
    had: dict[str, object], wanted: dict[str, object], expected: list[str]
) -> None:
    assert differences(had, had) == []
    assert differences(had, wanted) == expected


def test_differences_name_a_few_text_sources() -> None:
    """Without the keys that a source does not have, and without the files, which follow from the sources."""
    files = [{"source": f"{i}.en", "target": f"{i}.de", "tsv": None, "repeat": 1} for i in range(9)]
    pairs = {"source": None, "target": None, "tsv": "pairs.tsv", "repeat": 3}
    had, wanted = ({"settings": {"train": texts}} for texts in (files, [files[0], pairs]))
    had["source_files"] = wanted["source_files"] = []
    expected = "corpus.train: no longer 1.en 1.de, 2.en 2.de, 3.en 3.de, and 5 more, now pairs.tsv (repeat 3)"
    assert differences(had, wanted) == [expected]
    wanted = {"settings": {"train": files[::-1]}, "source_files": [{"file": "0.en", "bytes": 1, "sha256": "0"}]}
    assert differences(had, wanted) == ["corpus.train: another order, repetition, weight or name"]
