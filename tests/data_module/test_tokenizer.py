import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import regex
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from data_module.errors import InputError
from data_module.tokenization.encoders import WordEncoder
from data_module.tokenization.tokenizer import NUM_SPECIAL_IDS, Tokenizer, clean_lines, is_blank, normalize_white_space
from data_module.tokenization.training import standalone_model
from tests.conftest import INVISIBLE, train_tokenizer

SENTENCES = [
    f"The {adjective} {noun} sees ½ of the x² in Zürich… № {number}"
    for number, adjective in enumerate(["red", "green", "yellow", "quiet", "ΣΟΦΟΣ"])
    for noun in ["house", "horses", "mouse", "Haus", "Straße", "no\u00a0break"]
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(SENTENCES, 120)


def test_ids_are_int32_without_special_ids_and_special_ids_are_skipped(tokenizer: Tokenizer) -> None:
    (ids,) = tokenizer.encode([SENTENCES[0]])
    assert ids.dtype == np.int32
    assert ids.min() > 3
    framed = np.concatenate([[tokenizer.bos_id], ids, [tokenizer.eos_id, tokenizer.pad_id, tokenizer.unk_id]])
    assert tokenizer.decode([framed]) == [SENTENCES[0]]
    assert (tokenizer.pad_id, tokenizer.unk_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 1, 2, 3)


def test_a_lowercase_vocabulary_has_no_capitals() -> None:
    sentences = [*SENTENCES, "ÇA QUI ŽLUŤOUČKÝ ÉTÉ ДОМ İ"]
    tokenizer = train_tokenizer(sentences, 125, lowercase=True)
    assert [piece for piece in tokenizer.pieces()[4:] if piece != piece.lower()] == []
    capitals = [sentence.upper() for sentence in sentences if "ß" not in sentence]
    ids = tokenizer.encode(capitals)
    assert all(tokenizer.unk_id not in row for row in ids)
    # Characters are lower-cased one by one; str.lower() ends a Greek word in another sigma.
    assert tokenizer.decode(ids) == ["".join(map(str.lower, sentence)) for sentence in capitals]


def test_every_character_is_known_including_reserved_and_uncounted() -> None:
    sentences = [*SENTENCES, "rare 中 😀 ▅ \ufffd", "long " + "x" * 6000 + "語"]
    tokenizer = train_tokenizer(sentences, 130)
    for ids in tokenizer.encode(sentences):
        assert tokenizer.unk_id not in ids
    assert tokenizer.decode(tokenizer.encode(sentences)) == sentences


def test_coverage_below_one_excludes_rare_characters() -> None:
    sentences = ["abc cab bca " * 50] * 50 + ["中"]
    assert "中" in train_tokenizer(sentences, 14).pieces()
    assert "中" not in train_tokenizer(sentences, 14, character_coverage=0.99).pieces()


@pytest.mark.parametrize("model", [b"", b"junk", b"\x00" * 100])
def test_bytes_that_are_no_tokenizer(model: bytes, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a tokenizer"):
        Tokenizer(model)
    path = tmp_path / "tokenizer.model"
    path.write_bytes(model)
    with pytest.raises(InputError, match=r"tokenizer\.model: not a tokenizer"):
        Tokenizer.load(path)
    with pytest.raises(InputError, match=r"absent\.model: cannot read"):
        Tokenizer.load(tmp_path / "absent.model")


def test_word_encoder_equals_the_tokenizer(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    sentences = [*SENTENCES, "", "unknown 漢字 漢 字", "▅ a▅b", "one \u200b \xa0 two", *reversed(SENTENCES)]
    sentences += [normalize_white_space(f"{line} <b>{EMOJI}</b>{line}__NAME__😀") for line in SENTENCES]
    others = [_with_symbols(byte_fallback=True), *(make_type(kind) for kind in TYPES)]
    for one, remembered in ((tokenizer, 1_000_000), (tokenizer, 3), *((other, 1_000_000) for other in others)):
        monkeypatch.setattr("data_module.tokenization.encoders._MAX_CACHED_WORDS", remembered)
        encoder = WordEncoder(one, np.dtype(np.uint16))
        for start in range(0, len(sentences), 7):
            chunk = sentences[start : start + 7]
            encoded, lengths = encoder.encode(chunk)
            expected = one.encode(chunk)
            assert [np.frombuffer(ids, np.uint16).tolist() for ids in encoded] == [x.tolist() for x in expected]
            assert lengths.tolist() == [len(x) for x in expected]


@given(sentences=st.lists(st.text(max_size=20), min_size=1, max_size=6))
def test_any_text_survives_except_white_space(sentences: list[str]) -> None:
    expected = [
        " ".join(filter(None, re.split("[ \0\t-\r\x1c-\x1f\x85\u2028\u2029\u2581]", text))) for text in sentences
    ]
    characters = set("".join(expected)) - {" "}
    if not characters:
        with pytest.raises(InputError, match="no words"):
            train_tokenizer(sentences, 100)
        return
    tokenizer = train_tokenizer(sentences, len(characters) + 5)
    ids = tokenizer.encode(sentences)
    assert tokenizer.decode(ids) == ["" if regex.fullmatch(INVISIBLE, text) else text for text in expected]
    assert all(piece >= NUM_SPECIAL_IDS for row in ids for piece in row.tolist())
    lines = clean_lines("\n".join(text.replace("\n", " ") for text in sentences))
    encoded, lengths = WordEncoder(tokenizer, np.dtype(np.uint16)).encode(lines)
    assert [np.frombuffer(row, np.uint16).tolist() for row in encoded] == [row.tolist() for row in ids]
    assert lengths.tolist() == [len(row) for row in ids]


def test_only_a_line_without_a_visible_character_is_blank() -> None:
    characters = [chr(code) for code in range(0x110000) if chr(code) != "\n" and not 0xD800 <= code < 0xE000]
    invisible = set(regex.findall(INVISIBLE.removesuffix("*"), "".join(characters)))
    assert clean_lines("\n".join(characters)) == ["" if one in invisible else one for one in characters]
    # Neither is an invisible character between words, nor at the ends of a line that has others.
    for text in ("a \u200b b", "\u200fא\u200f", "\ufeffa", "\xa0!", "❤️"):
        assert clean_lines(text) == [text]
        assert not is_blank(text)
    assert is_blank("")
    assert is_blank(" \xa0\t\u200b\n\u3000 ")
    tokenizer = train_tokenizer(["a\xa0! \u3000 \u200b\ufeff"], 11)
    assert [len(ids) for ids in tokenizer.encode(["\xa0", "\u3000 \u200b", "\ufeff", "a\xa0!"])] == [0, 0, 0, 4]


def test_text_in_another_normal_form_than_the_vocabulary() -> None:
    composed, decomposed = "caf\xe9 r\xe9", "cafe\u0301 re\u0301"
    rare = {"byte_fallback": True, "vocabulary_size": 267}  # what occurs less than 20 times is bytes
    for known, other in ((composed, decomposed), (decomposed, composed)):
        for tokenizer in (train_tokenizer([known], len(set(known)) + 4), train_tokenizer([known] * 20, **rare)):
            for text, expected in (
                (known, False),
                (other, True),
                (f"{known} \u2603", False),
                (f"{other} \u2603", True),
            ):
                [ids] = tokenizer.encode([text])
                assert tokenizer.knows_other_form(text, ids.tolist()) is expected, text


TOKENS = ["<tag> [C@@H] Cl aː q͡χ 12", "Cl aː <tag> x<tag>y", "Cl [C@@H]1 Br"]
TYPES = {
    "word": {"vocabulary_size": 13, "user_symbols": ["<tag>"]},
    "char": {"vocabulary_size": 29, "user_symbols": ["<tag>", "Cl", "Br"]},
    "unigram": {"vocabulary_size": 27, "user_symbols": ["<tag>"]},
}
"""Settings of a tokenizer of each other type, for which TOKENS are enough text."""


def make_type(kind: str, text: list[str] = TOKENS, **options: object) -> Tokenizer:
    return train_tokenizer(text, model_type=kind, **TYPES[kind] | options)


@pytest.mark.parametrize(
    ("kind", "pieces"),
    [
        ("word", ["▁<tag>", "▁[C@@H]", "▁Cl", "▁Cl", "▁zz▁<tag>Cl▁Br2", "▁aː"]),
        ("char", [*"▁", "<tag>", *"▁[C@@H]▁", "Cl", *"▁", "Cl", *"▁", "zz", *"▁", "<tag>", "Cl", *"▁", "Br", *"2▁aː"]),
    ],
)
def test_pieces_of_one_line(kind: str, pieces: list[str]) -> None:
    """Words mix scripts, and unknown neighbours are one; characters are single but for symbols."""
    tokenizer, line = make_type(kind), "<tag> [C@@H]  Cl Cl zz <tag>Cl Br2 aː"
    assert tokenizer.spell(line) == pieces
    [ids] = tokenizer.encode([line])
    assert [piece for piece, one in zip(pieces, ids, strict=True) if one == tokenizer.unk_id] == [
        piece for piece in pieces if "zz" in piece
    ]
    unknown = " zz <tag>Cl Br2" if kind == "word" else "zz"
    assert tokenizer.decode([ids]) == [line.replace("  ", " ").replace(unknown, "")]


@pytest.mark.parametrize("kind", TYPES)
def test_each_type_of_model_keeps_text_and_symbols(kind: str) -> None:
    for tokenizer in (make_type(kind), pickle.loads(pickle.dumps(make_type(kind)))):  # noqa: S301
        assert (tokenizer.model_type, tokenizer.user_symbols) == (kind, TYPES[kind]["user_symbols"])
        assert (tokenizer.is_bpe, tokenizer.splits_digits) == (False, kind == "char")
    assert tokenizer.decode(tokenizer.encode(TOKENS)) == TOKENS
    assert tokenizer.model == make_type(kind, TOKENS[::-1]).model
    exported = sentencepiece.SentencePieceProcessor(model_proto=standalone_model(tokenizer))
    lines = [*TOKENS, "zz yy\tCl\u2028<tag>▁aː", ""]
    assert exported.encode(lines) == [ids.tolist() for ids in tokenizer.encode(lines)]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("word", {"vocabulary_size": 14}, "14 pieces are more than the training text allows; .* that works is 13"),
        ("word", {"vocabulary_size": 5}, "5 leaves no room for tokens of the text; set at least 6"),
        ("char", {"vocabulary_size": 30}, "30 pieces are more than the training text allows; .* that works is 29"),
        ("char", {"vocabulary_size": 28}, "28 is too small for the text's 21 .* 3 user symbols; set at least 29"),
        ("char", {"vocabulary_size": 7, "character_coverage": 0.98}, "7 is too small for the text's characters; set 2"),
        ("unigram", {"vocabulary_size": 99}, "99 pieces are more than the training text allows; the largest that"),
    ],
)
def test_the_size_of_a_vocabulary_by_type(kind: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=rf"^corpus\.vocabulary_size: {message}"):
        make_type(kind, **options)
    assert make_type("word", vocabulary_size=6).pieces()[4:] == ["▁<tag>", "▁Cl"]


def test_a_vocabulary_without_room_for_the_characters_that_it_has_to_cover() -> None:
    text = ["abcdefgh"] * 5000 + ["".join(map(chr, range(0x4E00, 0x4E00 + 100)))] * 30
    with pytest.raises(InputError, match=r"characters that make up 99\.50% of the text"):
        train_tokenizer(text, 60, character_coverage=0.995)


def test_words_in_lower_case() -> None:
    lower = make_type("word", vocabulary_size=10, lowercase=True)
    assert lower.decode(lower.encode(["<TAG> [C@@h] CL <tag>"])) == ["<tag> [c@@h] cl <tag>"]


def test_characters_of_long_words_leave_the_space_a_piece() -> None:
    text = ["ab" * 300] * 300 + ["ab é"]
    tokenizer = train_tokenizer(text, 7, model_type="char", character_coverage=0.98)
    assert tokenizer.decode(tokenizer.encode(["ab ba é"])) == ["ab ba "]


def test_a_word_as_long_as_sentencepiece_reads() -> None:
    longest = "é" * 2096
    assert make_type("word", [*TOKENS, longest], vocabulary_size=14).encode([longest])[0] > 3
    with pytest.raises(
        InputError, match=r"^corpus\.train: a token of 2,097 characters, which begins with 'éé.*4,192 by"
    ):
        make_type("word", [*TOKENS, longest + "é"])
    with pytest.raises(InputError, match="no words to train"):
        make_type("word", ["a▅ ▅"])
    for kind in ("char", "unigram"):  # whose pieces are parts of it
        text = [*TOKENS, "C" * 9000]
        tokenizer = make_type(kind, text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


EMOJI = "a 👩🏽‍💻 flag 🇩🇪, Ꮳꮃꭹ ጤና 𝕏 \u0301 ▅"
SYMBOLS = ["<b>", "</b>", "__NAME__", ">>de<<", "<b>x", 'a,"b', "\u2026", "«Ü»", "long" * 10]


@pytest.fixture(scope="module")
def byte_tokenizer() -> Tokenizer:
    return train_tokenizer(SENTENCES * 4, 380, byte_fallback=True)


def _with_symbols(**options: bool) -> Tokenizer:
    text = [*SENTENCES, "<b>red</b> horses of __NAME__"] * 4
    size = 150 + 256 * options.get("byte_fallback", False)
    return train_tokenizer(text, size, user_symbols=SYMBOLS, **options)


def test_with_byte_fallback_nothing_is_unknown(byte_tokenizer: Tokenizer) -> None:
    assert byte_tokenizer.byte_fallback
    sentences = [EMOJI, "", *SENTENCES, "<0x41> <unk> </s>"]
    encoded = byte_tokenizer.encode(sentences)
    assert all(byte_tokenizer.unk_id not in ids for ids in encoded)
    assert byte_tokenizer.decode(encoded) == sentences
    # Four bytes each, after the space.
    assert [len(ids) for ids in byte_tokenizer.encode(["😀", "😀😀", "𝕏"])] == [5, 9, 5]
    assert pickle.loads(pickle.dumps(byte_tokenizer)).byte_fallback  # noqa: S301


def test_incomplete_bytes_are_replaced(byte_tokenizer: Tokenizer) -> None:
    byte = byte_tokenizer.pieces().index("<0x00>").__add__
    (the,) = byte_tokenizer.encode(["the"])
    for values, text in (
        ([0xF0, 0x9F, 0x98, 0x80], "😀"),
        ([0xF0, 0x9F, 0x98], "\ufffd" * 3),
        ([0x9F], "\ufffd"),
        ([0xED, 0xA0, 0x80], "\ufffd" * 3),  # a surrogate
        ([0xC3, 0x0A, 0xBC], "\ufffd \ufffd"),
        ([0x0A, 0x09, 0x0D, 0x00], ""),
        ([0xE2, 0x80, 0xA8, 0xE2, 0x96, 0x81, 0x41], " A"),  # a line separator, and U+2581
    ):
        row = [*the.tolist(), *map(byte, values)]
        decoded = byte_tokenizer.decode([row, the, row])
        assert decoded == [f"the{text}", "the", f"the{text}"]


@given(st.lists(st.lists(st.integers(0, 379), max_size=20), max_size=5))
def test_any_ids_decode_to_one_normalized_line_each(byte_tokenizer: Tokenizer, rows: list[list[int]]) -> None:
    decoded = byte_tokenizer.decode(rows)
    assert len(decoded) == len(rows)
    for text in decoded:
        assert text == normalize_white_space(text)
        assert len(text.splitlines()) <= 1
        text.encode()  # no surrogates


def test_with_byte_fallback_rare_characters_are_bytes() -> None:
    text = ["abc abd bcd"] * 500 + ["中"] * 19 + ["語"] * 20 + ["É"] * 12 + ["é"] * 8 + ["«»"] * 100
    for lowercase, known in ((False, "語"), (True, "語é")):
        options = {"lowercase": lowercase, "byte_fallback": True, "user_symbols": ["«»"]}
        pieces = train_tokenizer(text, 280, **options).pieces()
        assert [character for character in "中語Éé«»" if character in pieces] == list(known)
        # Without bytes, all of them have to be pieces.
        options["byte_fallback"] = False
        pieces = train_tokenizer(text, 30, **options).pieces()
        assert set("中語é«»") <= set(pieces)


def test_the_smallest_vocabulary_with_bytes_and_symbols() -> None:
    text = ["abc abd bcd"] * 30
    options = {"byte_fallback": True, "user_symbols": ["<b>", "</b>"]}
    # 4 special ids, the space, 4 letters.
    message = r"266 is too small for the text's 4 distinct characters and 256 bytes and 2 user symbols; .* least 267,"
    with pytest.raises(InputError, match=message):
        train_tokenizer(text, 266, **options)
    tokenizer = train_tokenizer(text, 267, **options)
    assert tokenizer.vocabulary_size == 267
    assert tokenizer.decode(tokenizer.encode(["<b>é</b> abc"])) == ["<b>é</b> abc"]


@pytest.mark.parametrize("options", [{}, {"byte_fallback": True}, {"lowercase": True, "byte_fallback": True}])
def test_user_symbols_are_one_piece_everywhere(options: dict[str, bool]) -> None:
    tokenizer = _with_symbols(**options)
    assert tokenizer.user_symbols == SYMBOLS
    pieces = tokenizer.pieces()
    for symbol in SYMBOLS:
        for before, after in (("", ""), ("the ", " red"), ("the", "red"), (symbol, ""), ("", " the " + symbol)):
            sentence = before + symbol + after
            (ids,) = tokenizer.encode([sentence])
            assert [pieces[i] for i in ids].count(symbol) == sentence.count(symbol)
            assert tokenizer.decode([ids]) == [sentence]
    (ids,) = tokenizer.encode(["<b>The</b> __name__ __NAME__"])
    expected = "<b>the</b> __name__ __NAME__" if tokenizer.lowercase else "<b>The</b> __name__ __NAME__"
    if tokenizer.byte_fallback:
        assert tokenizer.decode([ids]) == [expected]
    assert [pieces[i] for i in ids].count("__NAME__") == 1
    assert pickle.loads(pickle.dumps(tokenizer)).user_symbols == SYMBOLS  # noqa: S301


def test_lower_keeps_symbols() -> None:
    tokenizer = _with_symbols(lowercase=True)
    text = ["The <b>HAUS</b> of __NAME__«Ü»Ü", "", "ΣΟΦΟΣ"]
    assert tokenizer.lower(text) == ["the <b>haus</b> of __NAME__«Ü»ü", "", "σοφοσ"]
    # Text in capitals can become a symbol; a symbol with capitals is not found in lower case.
    (ids,) = tokenizer.encode(["<B>the</B> __name__"])
    pieces = [tokenizer.pieces()[i] for i in ids]
    assert [pieces.count(symbol) for symbol in ("<b>", "</b>", "__NAME__")] == [1, 1, 0]


def test_a_reserved_character_is_no_user_symbol() -> None:
    tokenizer = train_tokenizer([*SENTENCES, "▅"], 130)
    assert "▅" in tokenizer.pieces()
    assert tokenizer.user_symbols == []
    assert not tokenizer.byte_fallback
