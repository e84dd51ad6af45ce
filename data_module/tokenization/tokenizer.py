"""Joint byte-pair encoding of both languages (section 5.1), trained and applied with sentencepiece.

Only white space is normalized (see `normalize_white_space`). `decode(encode(x))` equals `normalize_white_space(x)`, in
lower case if the tokenizer lower-cases.
"""

import hashlib
import io
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_module.errors import InputError
from data_module.tokenization.word_counts import WordCounts, normalize_white_space

PAD_ID, UNK_ID, BOS_ID, EOS_ID = range(4)
NUM_SPECIAL_IDS = 4
MAX_PIECE_CHARACTERS = 16

# sentencepiece cannot learn this character, because it uses it for unknown characters in training.
_RESERVED_CHARACTER = "\u2585"


class Tokenizer:
    """A trained joint vocabulary, which converts text to piece ids and back. It is pickled as its model's bytes.

    The model itself contains whether text is lower-cased, so that every program that loads the model does the same.
    """

    pad_id, unk_id, bos_id, eos_id = PAD_ID, UNK_ID, BOS_ID, EOS_ID

    def __init__(self, model: bytes) -> None:
        """Load a sentencepiece model from its bytes.

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
        self._processor = processor
        special_ids = (processor.pad_id(), processor.unk_id(), processor.bos_id(), processor.eos_id())
        if special_ids != (PAD_ID, UNK_ID, BOS_ID, EOS_ID):
            raise InputError(
                f"not this project's tokenizer: pad, unk, bos, eos are {special_ids}, not (0, 1, 2, 3);"
                " create one with prepare"
            )
        self.vocabulary_size: int = processor.get_piece_size()
        self.lowercase: bool = processor.normalize("A").endswith("a")

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

    def __reduce__(self) -> tuple[type["Tokenizer"], tuple[bytes]]:
        return Tokenizer, (self.model,)

    def encode(self, sentences: list[str], num_threads: int = 1) -> list[np.ndarray]:
        """Return the piece ids of each sentence, int32 without special ids. Unknown characters become `unk_id`.

        The GIL is released.
        """
        lines = "\n".join(sentences)
        if lines.count("\n") >= len(sentences):
            lines = "\n".join(sentence.replace("\n", " ") for sentence in sentences)
        normalized = normalize_white_space(lines).split("\n") if sentences else []
        return self._processor.encode(normalized, out_type="numpy", num_threads=num_threads)

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each sequence of ids. Special ids, including `unk_id`, are skipped."""
        text = [[int(piece) for piece in row if piece >= NUM_SPECIAL_IDS] for row in ids]
        return self._processor.decode(text) if text else []

    def normalize(self, words: Sequence[str]) -> list[str]:
        """Return words as the model's pieces spell them, for example in lower case, with U+2581 for a space."""
        return self._processor.normalize(list(words))

    def pieces(self) -> list[str]:
        """Return the vocabulary in the order of the ids. U+2581 in a piece represents a space."""
        return [self._processor.id_to_piece(i) for i in range(self.vocabulary_size)]


def train_tokenizer(
    sentences: Iterable[str],
    vocabulary_size: int,
    *,
    lowercase: bool = False,
    character_coverage: float = 1.0,
) -> bytes:
    """Train byte-pair encoding on sentences. The result is deterministic.

    Args:
        sentences: the training text.
        vocabulary_size: number of ids, including special ids and single characters.
        lowercase: whether the tokenizer lower-cases text.
        character_coverage: fraction of the text whose characters get a piece of their own, the most frequent first.

    Returns:
        The bytes of a sentencepiece model.

    Raises:
        InputError: the text is too small, or has too many characters, for this vocabulary size.
    """
    words = WordCounts()
    for sentence in sentences:
        line = normalize_white_space(sentence)
        words.add(line)
        words.add_characters(line)
    return train_on_words(words, vocabulary_size, lowercase=lowercase, character_coverage=character_coverage)


def train_on_words(
    words: WordCounts,
    vocabulary_size: int,
    *,
    lowercase: bool = False,
    character_coverage: float = 1.0,
) -> bytes:
    """Train a tokenizer as `train_tokenizer` does, from the words and characters of a text. The GIL is released."""
    characters = words.characters()
    characters = "".join(sorted(set("".join(c.lower() for c in characters) if lowercase else characters)))
    learnable = characters.replace(_RESERVED_CHARACTER, "")
    options: dict[str, Any] = {"required_chars": learnable} if character_coverage >= 1 else {}
    if learnable != characters:
        options["user_defined_symbols"] = [_RESERVED_CHARACTER]
    if not learnable:
        raise InputError("corpus.train: the text has no words to train a tokenizer on")
    smallest = len(characters) + NUM_SPECIAL_IDS + 1
    if character_coverage >= 1 and vocabulary_size < smallest:
        raise InputError(
            f"corpus.vocabulary_size: {vocabulary_size} is too small for the text's {len(characters)}"
            f" distinct characters; set at least {smallest}, or lower corpus.character_coverage"
        )
    with _LowercaseRules(lowercase) as rules:
        options |= rules | {"vocab_size": vocabulary_size, "character_coverage": character_coverage}
        try:
            model = _train(words, options)
        except RuntimeError as error:
            try:
                largest = Tokenizer(_train(words, options | {"hard_vocab_limit": False})).vocabulary_size
            except RuntimeError:
                raise InputError(
                    f"corpus.vocabulary_size: {vocabulary_size} is too small for the characters that make up"
                    f" {character_coverage:.2%} of the text; raise it, or lower corpus.character_coverage"
                ) from error
            raise InputError(
                f"corpus.vocabulary_size: {vocabulary_size} pieces are more than the training text allows;"
                f" the largest that works is {largest}"
            ) from error
    return _without_rule_path(model) if lowercase else model


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


class _LowercaseRules:
    """A context manager that returns the training options for lower-casing, or none if it is not wanted."""

    def __init__(self, lowercase: bool) -> None:
        self._path = ""
        self._lowercase = lowercase

    def __enter__(self) -> dict[str, Any]:
        if not self._lowercase:
            return {}
        descriptor, self._path = tempfile.mkstemp(suffix=".tsv")
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            for code in range(0x110000):
                lower = chr(code).lower()
                if lower != chr(code):
                    file.write(f"{code:X}\t{' '.join(f'{ord(character):X}' for character in lower)}\n")
        return {"normalization_rule_tsv": self._path}

    def __exit__(self, *_: object) -> None:
        if self._path:
            Path(self._path).unlink()


def _without_rule_path(model: bytes) -> bytes:
    """Remove the name of the temporary file, which differs every time, from the model."""
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto.FromString(model)  # type: ignore[attr-defined]
    proto.normalizer_spec.ClearField("normalization_rule_tsv")
    return proto.SerializeToString(deterministic=True)
