"""`corpus.tokenizer` takes a vocabulary that is there already, and `corpus.split_digits` spells numbers by digits."""

import io
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from data_module.corpus.checks import given_tokenizer
from data_module.corpus.preparation import existing_corpus
from data_module.errors import InputError
from data_module.settings import BpeDropout, CorpusSettings, TextSource
from data_module.tokenization.encoders import DropoutEncoder, WordEncoder
from data_module.tokenization.pair import join_models
from data_module.tokenization.tokenizer import SPACE_MARK, Tokenizer
from data_module.tokenization.training import standalone_model
from tests.conftest import sentences, train_tokenizer
from tests.data_module.conftest import made

NUMBERS = ["In 1999, 12,345.67 of 1.000 were 3rd.", "30 °C, 24/7, +49 30 1234567, 2024-05-01", "1999 2000 20 1 a1b22c"]


def settings_of(texts: Path, **changes: object) -> CorpusSettings:
    train, validation = (
        [TextSource(str(texts / f"{split}.source"), str(texts / f"{split}.target"))]
        for split in ("train", "validation")
    )
    defaults = {"folder": str(texts / "corpus"), "train": train, "validation": validation, "vocabulary_size": 60}
    return CorpusSettings(**defaults | changes)


def test_two_directions_have_one_vocabulary(tiny_corpus: Path, tmp_path: Path) -> None:
    settings = settings_of(tiny_corpus.parent)
    learned = shutil.copytree(tiny_corpus, tmp_path / "learned")
    texts = {"train": settings.train, "validation": settings.validation}
    other_way = {split: [TextSource(text.target, text.source)] for split, [text] in texts.items()}
    reverse = replace(settings, folder=str(tmp_path / "reverse"), tokenizer=str(learned), **other_way)
    made(reverse)
    for side, other in (("source", "target"), ("target", "source")):
        ours, theirs = (
            folder / f"train.{name}.tokens.npy" for folder, name in ((tmp_path / "reverse", side), (learned, other))
        )
        assert ours.read_bytes() == theirs.read_bytes()
    assert (tmp_path / "reverse/tokenizer.model").read_bytes() == (learned / "tokenizer.model").read_bytes()
    assert made(reverse) == existing_corpus(reverse, compare_texts=True)
    # The model may have gone, as the texts may; another one is a difference.
    (learned / "tokenizer.model").rename(learned / "away")
    assert existing_corpus(reverse, compare_texts=True) is not None
    (learned / "tokenizer.model").write_bytes(train_tokenizer(sentences(200, 9), 60).model)
    with pytest.raises(InputError, match=r"learned/tokenizer\.model has changed"):
        made(reverse)


def model_of(**options: object) -> bytes:
    model, lines = io.BytesIO(), iter(["a house and a tree"] * 9)
    options = {"vocab_size": 15, "minloglevel": 2, **options}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_writer=model, **options)
    return model.getvalue()


IDS = {"pad_id": 0, "unk_id": 1, "bos_id": 2, "eos_id": 3}
IDENTITY = {"normalization_rule_name": "identity"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (IDS, r"normalizes text \(nmt_nfkc\), which exports would not do"),
        (IDENTITY, r"pad, unk, bos, eos are \(-1, 0, 1, 2\), not \(0, 1, 2, 3\)"),
    ],
)
def test_models_of_other_programs(tiny_corpus: Path, tmp_path: Path, options: dict[str, object], message: str) -> None:
    model = tmp_path / "other.model"
    model.write_bytes(model_of(**options))
    folder = str(tmp_path / "corpus")
    settings = settings_of(tiny_corpus.parent, folder=folder, tokenizer=str(model), vocabulary_size=15)
    with pytest.raises(InputError, match=rf"^corpus\.tokenizer: .*other\.model.*{message}"):
        made(settings)
    model.write_bytes(model_of(**IDENTITY, **IDS))
    with pytest.raises(InputError, match=r"^corpus\.bpe_dropout: .*other\.model is no byte-pair encoding"):
        made(replace(settings, bpe_dropout=BpeDropout(0.1)))
    made(settings)
    with pytest.raises(
        InputError, match=r"^corpus\.model_type: .*other\.model is of type unigram; set it to unigram, or n"
    ):
        made(replace(settings, model_type="char"), force=True)
    made(replace(settings, model_type="unigram"), force=True)
    own_symbols = {"user_defined_symbols": ["\u2581<i>", "<b>"]}
    model.write_bytes(model_of(**IDENTITY, **IDS, **own_symbols, model_type="word", hard_vocab_limit=False))
    given = Tokenizer.load(model)
    assert given.user_symbols == ["<i>", "<b>"]
    words = replace(settings, vocabulary_size=given.vocabulary_size, user_symbols=["<i>", "<b>"])
    with pytest.raises(
        InputError, match=r"^corpus\.model_type: .*other\.model is of type word; set it to word, or name "
    ):
        made(words, force=True)
    made(replace(words, model_type="word"), force=True)


@pytest.mark.parametrize(
    "option", [{"split_by_whitespace": False}, {"add_dummy_prefix": False}, {"treat_whitespace_as_suffix": True}]
)
def test_text_is_encoded_whole_where_pieces_are_no_parts_of_words(tmp_path: Path, option: dict[str, bool]) -> None:
    model, text = tmp_path / "other.model", ["a tree and a house"]
    model.write_bytes(model_of(**IDENTITY, **IDS, **option, vocab_size=24, model_type="bpe"))
    given = Tokenizer.load(model)
    for tokenizer in (given, Tokenizer(join_models(given.model, given.model, given.pieces()))):
        [ids], _ = WordEncoder(tokenizer, np.dtype(np.uint16)).encode(text)
        assert np.frombuffer(ids, np.uint16).tolist() == tokenizer.encode(text)[0].tolist()
    dropout = BpeDropout(0.1)
    with pytest.raises(InputError, match=r"^corpus\.bpe_dropout: .*other\.model is no byte-pair encoding of this pro"):
        given_tokenizer(settings_of(tmp_path, tokenizer=str(model), vocabulary_size=24, bpe_dropout=dropout))


def test_a_run_to_start_from_has_the_tokenizer_that_is_named(tiny_corpus: Path, tmp_path: Path) -> None:
    own = Tokenizer.load(tiny_corpus / "tokenizer.model")
    other = train_tokenizer(sentences(200, 9), 60)
    settings = settings_of(tiny_corpus.parent, folder=str(tmp_path / "corpus"), tokenizer=str(tiny_corpus))
    with pytest.raises(InputError, match=r"^corpus\.tokenizer: .* is not the tokenizer of the run to start from; le"):
        made(settings, tokenizer=other)
    lacking = replace(settings, tokenizer=None, user_symbols=["<i>"])
    with pytest.raises(InputError, match=r"^corpus\.user_symbols: <i>: not in the tokenizer .* without --init-from$"):
        made(lacking, tokenizer=own)
    made(settings, tokenizer=own)


@pytest.fixture(scope="module")
def splitting() -> Tokenizer:
    return train_tokenizer([*NUMBERS * 50, *sentences(200, 9)], 90, split_digits=True)


def has_single_digits(pieces: list[str]) -> bool:
    return all(len(piece) == 1 for piece in pieces if set(piece) & set("0123456789"))


def test_each_digit_is_a_piece_for_all_encoders(splitting: Tokenizer) -> None:
    assert splitting.splits_digits
    assert has_single_digits(splitting.pieces())
    assert not has_single_digits(train_tokenizer([*NUMBERS * 50, *sentences(200, 9)], 90).pieces())
    plain = [ids.tolist() for ids in splitting.encode(NUMBERS)]
    assert splitting.decode(plain) == NUMBERS
    assert splitting.spell("a 2024")[-5:] == [SPACE_MARK, "2", "0", "2", "4"]
    words, _ = WordEncoder(splitting, np.dtype(np.uint16)).encode(NUMBERS)
    assert [np.frombuffer(ids, np.uint16).tolist() for ids in words] == plain
    assert [ids.tolist() for ids in DropoutEncoder(splitting, 0.0).encode(NUMBERS, 1)] == plain
    dropped = [ids.tolist() for ids in DropoutEncoder(splitting, 0.5).encode(NUMBERS, 1)]
    assert dropped != plain
    assert splitting.decode(dropped) == NUMBERS
    exported = sentencepiece.SentencePieceProcessor(model_proto=standalone_model(splitting))
    assert exported.encode(NUMBERS) == plain
