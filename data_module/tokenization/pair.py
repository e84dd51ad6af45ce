"""Two sentencepiece models with one vocabulary, as OPUS-MT's Marian models have them.

One model splits source sentences into pieces, the other target sentences; the vocabulary maps the pieces of both to
ids, which are not sentencepiece's. The three are stored as one sentencepiece model: its pieces are the vocabulary in
the order of the ids, so that every program decodes with it, and two more fields hold the models that encode.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from data_module.errors import InputError

SOURCE_FIELD, TARGET_FIELD = 1001, 1002
"""Numbers of the fields; sentencepiece leaves those from 200 on to others."""
SPACE_MARK = "\u2581"
"""The character by which sentencepiece represents a space. In text it is replaced by a space."""


def join_models(source: bytes, target: bytes, pieces: Sequence[str]) -> bytes:
    """Return the stored form.

    The vocabulary is in the order of the ids, beginning with the padding, unknown, begin and end symbols.

    Raises InputError if a model is no sentencepiece model.
    """
    proto = proto_of(b"")
    types = proto.SentencePiece
    kinds = dict(enumerate([types.CONTROL, types.UNKNOWN, types.CONTROL, types.CONTROL]))
    try:
        proto.trainer_spec.model_type = proto_of(source).trainer_spec.model_type
    except Exception:  # protobuf's
        raise InputError("source.spm: is no sentencepiece model") from None
    for number, piece in enumerate(pieces):
        proto.pieces.add(piece=piece, score=0.0, type=kinds.get(number, types.NORMAL))
    spec = proto.trainer_spec
    spec.pad_id, spec.unk_id, spec.bos_id, spec.eos_id = range(4)
    spec.pad_piece, spec.unk_piece, spec.bos_piece, spec.eos_piece = pieces[:4]
    proto.normalizer_spec.name = "identity"
    stored: bytes = proto.SerializeToString(deterministic=True)
    return stored + _field(SOURCE_FIELD, source) + _field(TARGET_FIELD, target)


def split_models(model: bytes) -> tuple[bytes, bytes] | None:
    """Return the models of source and target sentences from their stored form; None for any other model."""
    # Few models have the fields, and parsing a large model takes a second.
    if _tag(SOURCE_FIELD) not in model:
        return None
    from google.protobuf.unknown_fields import UnknownFieldSet  # which only these models need

    fields = {field.field_number: field.data for field in UnknownFieldSet(proto_of(model))}
    source, target = fields.get(SOURCE_FIELD), fields.get(TARGET_FIELD)
    return None if source is None or target is None else (bytes(source), bytes(target))


class PairEncoder:
    """Encodes text by one of the two models, as Transformers' MarianTokenizer does."""

    def __init__(self, model: bytes, pieces: Sequence[str], unk_id: int) -> None:
        """Load a sentencepiece model; `pieces` is the vocabulary in the order of the ids."""
        import sentencepiece  # as in `Tokenizer`

        self.processor = sentencepiece.SentencePieceProcessor()
        self.processor.load_from_serialized_proto(model)
        self._ids, self._unk_id = {piece: number for number, piece in enumerate(pieces)}, unk_id
        # The vocabulary's symbols are no text, though a model may have pieces with their spelling.
        own = [self.processor.id_to_piece(number) for number in range(self.processor.get_piece_size())]
        self._table = np.array([self._ids.get(piece, unk_id) for piece in own], dtype=np.int32)

    def encode(self, lines: Sequence[str], num_threads: int) -> list[np.ndarray]:
        """Return the ids of each line, int32.

        A piece that the vocabulary lacks becomes the unknown symbol. A run of characters that the model does not know
        is one piece, which the vocabulary may have as a piece of the other model. A language code such as `>>de<<` at
        the beginning of a line is one piece.
        """
        coded = [_split_code(line) for line in lines]
        in_model = self.processor.encode([text for _, text in coded], out_type="numpy", num_threads=num_threads)
        unknown = self.processor.unk_id()
        encoded = []
        for (code, text), own_ids in zip(coded, in_model, strict=True):
            ids = self._table[own_ids]
            if (own_ids == unknown).any():
                spelt = self.processor.encode(text, out_type=str)
                ids = np.array([self._ids.get(piece, self._unk_id) for piece in spelt], dtype=np.int32)
            if code:
                ids = np.concatenate([np.array([self._ids.get(code, self._unk_id)], dtype=np.int32), ids])
            encoded.append(ids)
        return encoded

    def encode_as_pieces(self, line: str) -> list[str]:
        """Return the pieces of a line as text, in the order of the ids that `encode` returns."""
        code, text = _split_code(line)
        pieces: list[str] = self.processor.encode(text, out_type=str)
        return [code, *pieces] if code else pieces

    def decode(self, pieces: Sequence[Sequence[str]]) -> list[str]:
        """Return the text of each sentence's pieces."""
        texts: list[str] = self.processor.decode([list(sentence) for sentence in pieces]) if pieces else []
        return [text.replace(SPACE_MARK, " ").strip() for text in texts]


def is_code(piece: str) -> bool:
    """Return whether a piece is a language code, such as `>>de<<`."""
    return piece.startswith(">>") and piece.endswith("<<")


def _split_code(line: str) -> tuple[str, str]:
    """Return the language code at the beginning of a line, or an empty one, and the rest."""
    end = line.find("<<") if line.startswith(">>") else -1
    return ("", line) if end < 0 else (line[: end + 2], line[end + 2 :])


def proto_of(model: bytes) -> Any:
    """Return a model as a protocol buffer of sentencepiece."""
    from sentencepiece import sentencepiece_model_pb2  # as in `Tokenizer`

    return sentencepiece_model_pb2.ModelProto.FromString(model)  # type: ignore[attr-defined]


def _tag(number: int) -> bytes:
    """Return the tag of a field of bytes, as protobuf writes it."""
    return _varint(number << 3 | 2)


def _field(number: int, data: bytes) -> bytes:
    return _tag(number) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    written = bytearray()
    while value > 127:
        written.append(value & 127 | 128)
        value >>= 7
    return bytes([*written, value])
