"""Joint byte-pair encoding of both languages (section 5.1), trained and applied with sentencepiece.

Only white space is normalized (see `normalize_white_space`). `decode(encode(x))` equals `normalize_white_space(x)`, in
lower case if the tokenizer lower-cases, and without unknown characters. With byte fallback, no character is unknown:
one without a piece of its own becomes the pieces of its UTF-8 bytes. A user symbol is always one piece, also inside a
word, and keeps its case.
"""

import hashlib
import io
import os
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from data_module.errors import InputError
from data_module.tokenization.pair import PairEncoder, is_code, split_models
from data_module.tokenization.word_counts import WordCounts, normalize_white_space

PAD_ID, UNK_ID, BOS_ID, EOS_ID = range(4)
NUM_SPECIAL_IDS = 4
MAX_PIECE_CHARACTERS = 16
"""A user symbol may have more."""
NUM_BYTES = 256
"""Number of pieces that byte fallback adds."""
SPECIAL_NAMES = ("<pad>", "<unk>", "<s>", "</s>")
"""The pieces of the special ids."""
BYTE_NAMES = tuple(f"<0x{byte:02X}>" for byte in range(NUM_BYTES))
"""The pieces of the bytes, with byte fallback."""
MIN_CHARACTER_COUNT = 20
"""With byte fallback, a character that the text has less often than this gets no piece of its own."""

# sentencepiece cannot learn this character, because it uses it for unknown characters in training.
_RESERVED_CHARACTER = "\u2585"


class Tokenizer:
    """A trained joint vocabulary, which converts text to piece ids and back. It is pickled as its model's bytes.

    The model itself contains whether text is lower-cased, so that every program that loads the model does the same.
    """

    pad_id, unk_id, bos_id, eos_id = PAD_ID, UNK_ID, BOS_ID, EOS_ID

    def __init__(self, model: bytes, encodes_target: bool = False) -> None:
        """Load a sentencepiece model from its bytes.

        Args:
            model: the bytes.
            encodes_target: encode target sentences, if there are two models; see `target`.

        Raises:
            InputError: the bytes are no sentencepiece model, or its special ids are not this project's.
        """
        # Imported here because it need not be installed to load batches.
        import sentencepiece

        self.model = model
        self.sha256 = hashlib.sha256(model).hexdigest()
        try:
            processor = sentencepiece.SentencePieceProcessor()
            # sentencepiece loads an empty model and fails only when it is used.
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
        self.lowercase: bool = self._encoder.normalize("A").endswith("a")
        self.byte_fallback: bool = self._encoder.is_byte(self._encoder.piece_to_id(BYTE_NAMES[0]))

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Load a model file.

        Raises:
            InputError: the file cannot be read, or is no tokenizer; the message names it.
        """
        try:
            return cls(Path(path).read_bytes())
        except OSError as error:
            raise InputError(f"{path}: cannot read the tokenizer: {error.strerror}; run prepare") from error
        except InputError as error:
            raise InputError(f"{path}: {error}") from error

    def __reduce__(self) -> tuple[type["Tokenizer"], tuple[bytes, bool]]:
        return Tokenizer, (self.model, self._encodes_target)

    @cached_property
    def target(self) -> "Tokenizer":
        """The tokenizer that encodes target sentences: this one, unless it has two models."""
        return self if self.pair is None else Tokenizer(self.model, encodes_target=True)

    @cached_property
    def _pair_encoder(self) -> PairEncoder | None:
        return PairEncoder(self.pair[self._encodes_target], self.pieces(), self.unk_id) if self.pair else None

    @property
    def _encoder(self) -> Any:
        """The sentencepiece processor that encodes."""
        return self._pair_encoder.processor if self._pair_encoder else self._processor

    def encode(self, sentences: list[str], num_threads: int = 1) -> list[np.ndarray]:
        """Return the piece ids of each source sentence, int32 without special ids. Unknown characters become `unk_id`.

        With byte fallback no character is unknown. For target sentences, see `target`.
        The GIL is released.
        """
        lines = "\n".join(sentences)
        if lines.count("\n") >= len(sentences):
            lines = "\n".join(sentence.replace("\n", " ") for sentence in sentences)
        normalized = normalize_white_space(lines).split("\n") if sentences else []
        if self._pair_encoder:
            return self._pair_encoder.encode(normalized, num_threads)
        return self._processor.encode(normalized, out_type="numpy", num_threads=num_threads)

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each sequence of ids. Special ids, including `unk_id`, are skipped.

        With byte fallback, ids may be any bytes. Those that are no UTF-8 become U+FFFD each, and white space is
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
        """Return sentences in lower case as a tokenizer that lower-cases decodes them: user symbols keep their case."""
        return [text.removeprefix("\u2581").replace("\u2581", " ") for text in self.normalize(sentences)]

    @cached_property
    def is_bpe(self) -> bool:
        """Whether it is one byte-pair encoding, which BPE-dropout needs."""
        spec = self.proto().trainer_spec
        return not self.pair and bool(spec.model_type == spec.BPE)

    @cached_property
    def user_symbols(self) -> list[str]:
        """The user symbols that the tokenizer was trained with, in the order of their ids.

        Of two models with one vocabulary, these are the language codes in the vocabulary.
        """
        if self.pair:
            return [piece for piece in self._pieces if is_code(piece)]
        proto = self.proto()
        kind = proto.SentencePiece.USER_DEFINED
        return [p.piece for p in proto.pieces if p.type == kind and p.piece != _RESERVED_CHARACTER]

    def proto(self) -> Any:
        """Return the model as a protocol buffer of sentencepiece."""
        from sentencepiece import sentencepiece_model_pb2

        return sentencepiece_model_pb2.ModelProto.FromString(self.model)  # type: ignore[attr-defined]

    def pieces(self) -> list[str]:
        """Return the vocabulary in the order of the ids. U+2581 in a piece represents a space."""
        return list(self._pieces)

    @cached_property
    def _pieces(self) -> list[str]:
        return [self._processor.id_to_piece(i) for i in range(self.vocabulary_size)]


def train_on_words(
    words: WordCounts,
    vocabulary_size: int,
    *,
    lowercase: bool = False,
    character_coverage: float = 1.0,
    byte_fallback: bool = False,
    user_symbols: Sequence[str] = (),
) -> bytes:
    """Train byte-pair encoding on the words and characters of a text. The result is deterministic.

    The GIL is released.

    Args:
        words: words and characters of the text, with their counts.
        vocabulary_size: number of ids, including special ids, user symbols, bytes and single characters.
        lowercase: whether the tokenizer lower-cases text.
        character_coverage: fraction of the text whose characters get a piece of their own, the most frequent first.
        byte_fallback: add a piece for each byte, which spell the characters that have no piece of their own. Even with
            a coverage of 1, these are all characters that occur less than `MIN_CHARACTER_COUNT` times: an embedding is
            not learned from so few, and without text in bytes the bytes' would not be learned either.
        user_symbols: words and tags that become one piece each. They are matched before anything else, the longest
            first.

    Returns:
        The bytes of a sentencepiece model.

    Raises:
        InputError: the text is too small, or has too many characters, for this vocabulary size.
    """
    options = _options(words, vocabulary_size, lowercase, character_coverage, byte_fallback, user_symbols)
    with RuleFile(lowercase_rules() if lowercase else {}) as rules:
        options |= rules
        try:
            model = _train(words, options)
        except RuntimeError as error:
            try:
                largest = Tokenizer(_train(words, options | {"hard_vocab_limit": False})).vocabulary_size
            except RuntimeError:
                raise InputError(
                    f"corpus.vocabulary_size: {vocabulary_size} is too small for the characters that make up"
                    f" {options['character_coverage']:.2%} of the text; raise it, or lower corpus.character_coverage"
                ) from error
            raise InputError(
                f"corpus.vocabulary_size: {vocabulary_size} pieces are more than the training text allows;"
                f" the largest that works is {largest}"
            ) from error
    return _without_rule_path(model) if lowercase else model


def _options(
    words: WordCounts,
    vocabulary_size: int,
    lowercase: bool,
    character_coverage: float,
    byte_fallback: bool,
    user_symbols: Sequence[str],
) -> dict[str, Any]:
    """Return the training options that depend on the arguments of `train_on_words`, but for those of lower-casing.

    Raises:
        InputError: the text has no words, or more characters than the vocabulary has room for.
    """
    known = words.characters()
    if not known.replace(_RESERVED_CHARACTER, ""):
        raise InputError("corpus.train: the text has no words to train a tokenizer on")
    counts = words.character_counts(user_symbols) if byte_fallback else dict.fromkeys(known, MIN_CHARACTER_COUNT)
    if lowercase:
        cased, counts = counts, Counter()
        for character, count in cased.items():
            counts.update(dict.fromkeys(character.lower(), count))
    characters = {character for character, count in counts.items() if count >= MIN_CHARACTER_COUNT}
    symbols = [*user_symbols]
    if _RESERVED_CHARACTER in characters and not byte_fallback:
        symbols.append(_RESERVED_CHARACTER)
    learnable = "".join(sorted(characters - {_RESERVED_CHARACTER, *symbols}))
    options: dict[str, Any] = {"vocab_size": vocabulary_size, "character_coverage": character_coverage}
    if symbols:
        options["user_defined_symbols"] = symbols
    if byte_fallback:
        options["byte_fallback"] = True
    if character_coverage >= 1:
        options["required_chars"] = learnable
        # sentencepiece adds the most frequent of the other characters until this much of the text is covered, and
        # accepts no less.
        options["character_coverage"] = 0.98 if byte_fallback else 1.0
        smallest = minimum_size(len(user_symbols), byte_fallback) + len(learnable) + len(symbols) - len(user_symbols)
        if vocabulary_size < smallest:
            others = [f"{NUM_BYTES} bytes"] * byte_fallback + [f"{len(user_symbols)} user symbols"] * bool(user_symbols)
            raise InputError(
                f"corpus.vocabulary_size: {vocabulary_size} is too small for the text's"
                f" {' and '.join([f'{len(characters)} distinct characters', *others])}; set at least {smallest}, or"
                " lower corpus.character_coverage"
            )
    return options


def minimum_size(num_user_symbols: int, byte_fallback: bool) -> int:
    """Return the number of pieces that a vocabulary has beside those of characters and words."""
    return NUM_SPECIAL_IDS + 1 + num_user_symbols + NUM_BYTES * byte_fallback


def _train(words: WordCounts, options: dict[str, Any]) -> bytes:
    import sentencepiece

    # sentencepiece resolves ties by order of appearance; the counter preserves the order of the text.
    lines = (f"{word}\t{count}" for word, count in words.counts.items() if word and _RESERVED_CHARACTER not in word)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_writer=model,
        input_format="tsv",
        model_type="bpe",
        pad_id=PAD_ID,
        unk_id=UNK_ID,
        bos_id=BOS_ID,
        eos_id=EOS_ID,
        max_sentencepiece_length=MAX_PIECE_CHARACTERS,
        # The model contains its training options, so a number that depends on the machine would change its bytes.
        num_threads=16,
        minloglevel=2,
        **({"normalization_rule_name": "identity"} | options),
    )
    return model.getvalue()


class RuleFile:
    """A context manager that returns the training options for replacing characters, or none if there are no rules."""

    def __init__(self, rules: Mapping[str, str]) -> None:
        """`rules` maps characters to the text that takes their place."""
        self._path = ""
        self._rules = rules

    def __enter__(self) -> dict[str, Any]:
        if not self._rules:
            return {}
        descriptor, self._path = tempfile.mkstemp(suffix=".tsv")
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            for character, text in self._rules.items():
                file.write(f"{ord(character):X}\t{' '.join(f'{ord(one):X}' for one in text)}\n")
        return {"normalization_rule_tsv": self._path}

    def __exit__(self, *_: object) -> None:
        if self._path:
            Path(self._path).unlink()


def lowercase_rules() -> dict[str, str]:
    """Return the characters that lower-casing changes, and what it changes them to."""
    return {character: character.lower() for character in map(chr, range(0x110000)) if character.lower() != character}


def _without_rule_path(model: bytes) -> bytes:
    """Remove the name of the temporary file, which differs every time, from the model."""
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto.FromString(model)  # type: ignore[attr-defined]
    proto.normalizer_spec.ClearField("normalization_rule_tsv")
    return proto.SerializeToString(deterministic=True)
