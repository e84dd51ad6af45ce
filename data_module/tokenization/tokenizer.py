"""Joint vocabulary of both languages (section 5.1), trained and applied with sentencepiece.

Only white space is normalized (see `clean_lines`). `decode(encode(x))` equals `normalize_white_space(x)`, in
lower case if the tokenizer lower-cases, and without unknown characters. With byte fallback, no character is unknown:
one without a piece of its own becomes the pieces of its UTF-8 bytes. A user symbol is always one piece, also inside a
word, and keeps its case.

In a model of type `word`, a piece is what stands between two spaces, and so is a user symbol. Neighbouring words
without a piece become one unknown piece.
"""

import hashlib
import re
import unicodedata
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from data_module.errors import InputError
from data_module.system.files import PlainValues, read_whole
from data_module.tokenization.pair import SPACE_MARK, PairEncoder, is_code, proto_of, split_models

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

TOKENIZER_NAME = "tokenizer.model"
"""Name of the file of a tokenizer in corpora, runs and bundles."""
PAD_ID, UNK_ID, BOS_ID, EOS_ID = range(4)
NUM_SPECIAL_IDS = 4
MAX_PIECE_CHARACTERS = 16
"""Maximum length of a learned piece; a user symbol may be longer, and so may a piece of type `word`."""
LONGEST_TOKEN = 4192
"""Bytes of the longest word from which sentencepiece learns."""
NUM_BYTES = 256
"""Number of pieces that byte fallback adds."""
SPECIAL_NAMES = ("<pad>", "<unk>", "<s>", "</s>")
"""The pieces of the special ids."""
BYTE_NAMES = tuple(f"<0x{byte:02X}>" for byte in range(NUM_BYTES))
"""The pieces of the bytes, with byte fallback."""
_SEEN = ".seen"
"""Suffix, in place of `.model`, of the file that records which pieces training has seen."""
# All characters that some program treats as the end of a line or column; NUL; U+001F, which sentencepiece does not
# learn; and sentencepiece's mark of a space. Other white space, such as U+00A0, is part of the text.
SPACE_LIKE = "\0\t\r\v\f\x1c\x1d\x1e\x1f\x85\u2028\u2029" + SPACE_MARK

# White space, control characters, and Unicode's Default_Ignorable_Code_Point characters, such as zero-width ones; also
# the blank pattern of Braille.
_INVISIBLE = (
    "\0- \x7f-\xa0\xad\u034f\u061c\u115f\u1160\u1680\u17b4\u17b5\u180b-\u180f\u2000-\u200f\u2028-\u202f\u205f-\u206f"
    "\u2800\u3000\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
_INVISIBLE_TEXT = re.compile(f"[{_INVISIBLE}]+")

# Accents of Latin, Greek and Cyrillic letters, of Arabic alef, parts of Korean syllables, voicing marks of Japanese.
_MARK = re.compile("[\u0300-\u036f\u0653-\u0655\u1161-\u11c2\u3099\u309a]")

# sentencepiece cannot learn this character, because it uses it for unknown characters in training.
RESERVED_CHARACTER = "\u2585"


def normalize_white_space(lines: str) -> str:
    r"""Replace every run of white space in "\n"-separated lines by one space, and strip the lines.

    Tabs, NUL, U+001F, U+2581 and all line ends of Unicode except "\n" count as white space. The function takes many
    lines at once, which is a hundred times faster than a call per line.
    """
    for character in SPACE_LIKE:
        lines = lines.replace(character, " ")
    while "  " in lines:
        lines = lines.replace("  ", " ")
    return lines.replace("\n ", "\n").replace(" \n", "\n").strip(" ")


def clean_lines(text: str) -> list[str]:
    r"""Return the "\n"-separated lines of a text with normalized white space; one without a visible character is empty.

    An invisible character between words stays.
    """
    lines = normalize_white_space(text).split("\n")
    # Few lines, if any, begin with an invisible character, and matching each line is slow.
    if _INVISIBLE_TEXT.search("".join([line[:1] for line in lines])):
        lines = ["" if _INVISIBLE_TEXT.fullmatch(line) else line for line in lines]
    return lines


def is_blank(text: str) -> bool:
    """Return whether a text has no visible character, and so is empty for a model."""
    return not any(clean_lines(text))


def normal_form(text: str) -> Literal["NFC", "NFD"] | None:
    """Return "NFD" if a letter and an accent of `_MARK` are two characters that have a single one.

    Return "NFC" if such letters and accents are always one character, None if there are none.
    """
    characters = "\n".join(set(text))  # Apart, so that none composes with another. They are few in a long text.
    if _MARK.search(characters) and len(unicodedata.normalize("NFC", text)) < len(text):
        return "NFD"
    apart = unicodedata.normalize("NFD", characters)
    return "NFC" if _MARK.search(apart) and len(unicodedata.normalize("NFC", apart)) < len(apart) else None


def symbol_places(text: str, model_type: str) -> str | set[str]:
    """Return what holds the user symbols that a tokenizer finds in a text: the text, or its words for type `word`."""
    return set(text.replace("\n", " ").split(" ")) if model_type == "word" else text


class Tokenizer:
    """A trained joint vocabulary, which converts text to piece ids and back. It is pickled as its model's bytes.

    The model itself contains whether text is lower-cased, so that every program that loads the model does the same.
    """

    pad_id, unk_id, bos_id, eos_id = PAD_ID, UNK_ID, BOS_ID, EOS_ID
    search_ids = BOS_ID, EOS_ID, PAD_ID, UNK_ID
    """The special ids in the order in which a search takes them."""

    def __init__(
        self, model: bytes, encodes_target: bool = False, seen: bytes | None = None, form: PlainValues | None = None
    ) -> None:
        """Load a sentencepiece model from its bytes.

        Args:
            model: the bytes.
            encodes_target: encode target sentences, if there are two models; see `target`.
            seen: a byte for each piece: 1 if it occurs in a source sentence that a network was trained on, plus 2 if it
                occurs in a target sentence. None if that is not known.
            form: the form of the training text (see `text_form.SHAPE`); None if that is not known.

        Raises InputError if the bytes are no sentencepiece model, its special ids are not this project's, or `seen`
        belongs to another vocabulary.
        """
        # Imported late: mistakes in a recipe are refused first, and loading batches does not need it.
        import sentencepiece

        self.model = model
        self.sha256 = hashlib.sha256(model).hexdigest()
        try:
            processor = sentencepiece.SentencePieceProcessor()
            # sentencepiece would load an empty model and fail only when that is used.
            processor.load_from_serialized_proto(model or b"none")
        except RuntimeError as error:
            raise InputError("not a tokenizer: no sentencepiece model; run prepare again") from error
        # The models that encode, if they are two with one vocabulary; `model` then decodes only.
        self.pair = split_models(model)
        self._encodes_target = encodes_target
        self._processor = processor
        special_ids = (processor.pad_id(), processor.unk_id(), processor.bos_id(), processor.eos_id())
        if special_ids != (PAD_ID, UNK_ID, BOS_ID, EOS_ID):
            raise InputError(
                f"not this project's tokenizer: pad, unk, bos, eos are {special_ids}, not (0, 1, 2, 3);"
                " create one with prepare"
            )
        self.vocabulary_size: int = processor.get_piece_size()
        if seen is not None and len(seen) != self.vocabulary_size:
            raise InputError(
                f"has {self.vocabulary_size} pieces, but its file {_SEEN} of pieces that training has seen has"
                f" {len(seen)}; copy or create both files again"
            )
        self.seen, self.form = seen, form
        self.lowercase: bool = self._encoder.normalize("A").endswith("a")
        self.byte_fallback: bool = self._encoder.is_byte(self._encoder.piece_to_id(BYTE_NAMES[0]))

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Load a model file, and the record of seen pieces that `save` has written beside it.

        Raises InputError if the file cannot be read, or is no tokenizer; the message names it.
        """
        record = path.with_suffix(_SEEN)
        try:
            model, seen = read_whole(path), read_whole(record) if record.exists() else None
        except OSError as error:
            raise InputError(f"{path}: cannot read the tokenizer: {error.strerror}; run prepare") from error
        try:
            return cls(model, seen=seen)
        except InputError as error:
            raise InputError(f"{path}: {error}") from error

    def save(self, path: Path) -> None:
        """Write the model, and beside it the record of pieces that training has seen, if that is known."""
        path.write_bytes(self.model)
        if self.seen is not None:
            path.with_suffix(_SEEN).write_bytes(self.seen)

    def __reduce__(self) -> tuple[type["Tokenizer"], tuple[bytes, bool, bytes | None, PlainValues | None]]:
        return Tokenizer, (self.model, self._encodes_target, self.seen, self.form)

    def also_seen(self, other: "Tokenizer | None") -> "Tokenizer":
        """Return this tokenizer with the pieces that training saw with it or with another one of the same model."""
        if other is None or other.model != self.model:
            return self
        both = self.seen and other.seen and bytes(a | b for a, b in zip(self.seen, other.seen, strict=True))
        return Tokenizer(self.model, self._encodes_target, both, self.form)

    def never_seen(self, is_target: bool) -> frozenset[int]:
        """Return `unk_id` and the ids that occur in no source, or in no target sentence of training."""
        return self._never_seen[is_target]

    @cached_property
    def _never_seen(self) -> list[frozenset[int]]:
        seen = np.frombuffer(self.seen or b"\3" * self.vocabulary_size, dtype=np.uint8)[NUM_SPECIAL_IDS:]
        return [frozenset([UNK_ID, *(np.flatnonzero(~seen & bit) + NUM_SPECIAL_IDS).tolist()]) for bit in (1, 2)]

    @cached_property
    def target(self) -> "Tokenizer":
        """The tokenizer that encodes target sentences: this one, unless it has two models."""
        return self if self.pair is None else Tokenizer(self.model, True, self.seen, self.form)

    @cached_property
    def _pair_encoder(self) -> PairEncoder | None:
        return PairEncoder(self.pair[self._encodes_target], self.pieces(), self.unk_id) if self.pair else None

    @property
    def _encoder(self) -> "SentencePieceProcessor":
        """The sentencepiece processor that encodes."""
        return self._pair_encoder.processor if self._pair_encoder else self._processor

    def encode(self, sentences: list[str], num_threads: int = 1) -> list[np.ndarray]:
        """Return the piece ids of each source sentence, int32 without special ids. Unknown characters become `unk_id`.

        A sentence without a visible character has no ids; see `clean_lines`. With byte fallback no character is
        unknown. For target sentences, see `target`. The GIL is released.
        """
        lines = "\n".join(sentences)
        if lines.count("\n") >= len(sentences):
            lines = "\n".join(sentence.replace("\n", " ") for sentence in sentences)
        return self.encode_cleaned(clean_lines(lines) if sentences else [], num_threads)

    def encode_cleaned(self, sentences: list[str], num_threads: int = 1) -> list[np.ndarray]:
        """Do what `encode` does for sentences, or words of them, that `clean_lines` has returned."""
        if self._pair_encoder:
            return self._pair_encoder.encode(sentences, num_threads)
        return self._processor.encode(sentences, out_type="numpy", num_threads=num_threads)

    def spell(self, sentence: str) -> list[str]:
        """Return the pieces of a source sentence as text, in the order of their ids; unknown characters are kept."""
        encoder = self._pair_encoder or self._processor
        return list(encoder.encode_as_pieces(normalize_white_space(sentence.replace("\n", " "))))

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each sequence of ids. Special ids, including `unk_id`, are skipped.

        With byte fallback, ids may spell any bytes. Each byte that is not UTF-8 becomes U+FFFD, and white space is
        normalized, because bytes can also spell line breaks and tabs.
        """
        text = [[int(piece) for piece in row if piece >= NUM_SPECIAL_IDS] for row in ids]
        if self._pair_encoder:
            decoded = self._pair_encoder.decode([[self._pieces[piece] for piece in row] for row in text])
        else:
            decoded = self._processor.decode(text) if text else []
        if not self.byte_fallback or not decoded:
            return decoded
        return normalize_white_space("\n".join(line.replace("\n", " ") for line in decoded)).split("\n")

    def normalize(self, words: Sequence[str]) -> list[str]:
        """Return text as the model's pieces spell it: in lower case if the model lower-cases, U+2581 for a space."""
        return self._encoder.normalize(list(words))

    def lower(self, sentences: Sequence[str]) -> list[str]:
        """Return sentences in lower case, as a lower-casing tokenizer decodes them: user symbols keep their case."""
        return [text.removeprefix(SPACE_MARK).replace(SPACE_MARK, " ") for text in self.normalize(sentences)]

    @cached_property
    def model_type(self) -> str:
        """What a piece is; see `CorpusSettings.model_type`."""
        spec = self.proto().trainer_spec
        return str(spec.ModelType.Name(spec.model_type)).lower()

    @property
    def is_bpe(self) -> bool:
        """Whether the model is a single byte-pair encoding of words, as BPE-dropout needs."""
        return not self.pair and self.model_type == "bpe" and self.splits_words

    @cached_property
    def splits_words(self) -> bool:
        """Whether pieces are parts of words, each with the mark of the space before it: each word encodes by itself.

        A model of another program may have pieces across spaces, marks behind words, or no mark before the first word.
        """
        proto = self.proto() if self.pair is None else proto_of(self.pair[self._encodes_target])
        marks_inside = any(SPACE_MARK in one.piece.lstrip(SPACE_MARK) for one in proto.pieces)
        return bool(proto.normalizer_spec.add_dummy_prefix) and not marks_inside

    @cached_property
    def splits_digits(self) -> bool:
        """Whether each of the digits 0 to 9 is a piece of its own."""
        return self.model_type == "char" or bool(self.proto().trainer_spec.split_digits)

    @cached_property
    def normalization(self) -> str:
        """The name of sentencepiece's rules that change text before it is encoded: "identity" changes nothing."""
        return str(self.proto().normalizer_spec.name)

    @cached_property
    def user_symbols(self) -> list[str]:
        """The user symbols that the tokenizer was trained with, in the order of their ids.

        For two models with one vocabulary, these are the language codes in the vocabulary.
        """
        if self.pair:
            return [piece for piece in self._pieces if is_code(piece)]
        proto = self.proto()
        kind = proto.SentencePiece.USER_DEFINED
        symbols = [p.piece for p in proto.pieces if p.type == kind and p.piece != RESERVED_CHARACTER]
        if self.model_type == "word":  # A model of another program may have a symbol with and without the space.
            symbols = list(dict.fromkeys(symbol.removeprefix(SPACE_MARK) for symbol in symbols))
        return symbols

    @cached_property
    def _strange_ids(self) -> frozenset[int]:
        """The ids of characters without a piece of their own."""
        names = BYTE_NAMES if self.byte_fallback else ()
        return frozenset([self.unk_id, *map(self._processor.piece_to_id, names)])

    def knows_other_form(self, sentence: str, ids: Sequence[int]) -> bool:
        """Return whether more characters of a sentence have pieces in the other one of the normal forms NFC and NFD.

        `ids` are what `encode` returns for the sentence.
        """
        strange = sum(map(self._strange_ids.__contains__, ids))
        if not strange:
            return False
        [others] = self.encode([unicodedata.normalize("NFC" if normal_form(sentence) == "NFD" else "NFD", sentence)])
        return sum(map(self._strange_ids.__contains__, others.tolist())) < strange

    def proto(self) -> Any:
        """Return the model as a protocol buffer of sentencepiece."""
        return proto_of(self.model)

    def pieces(self) -> list[str]:
        """Return the vocabulary in the order of the ids. U+2581 in a piece represents a space."""
        return list(self._pieces)

    @cached_property
    def _pieces(self) -> list[str]:
        return [self._processor.id_to_piece(i) for i in range(self.vocabulary_size)]
