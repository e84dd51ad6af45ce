"""What an engine of `benchmark decode` is given, and what it gives."""

from pathlib import Path
from typing import Any, NamedTuple, Protocol

BATCH_TOKENS = 4096


class Settings(NamedTuple):
    """What all engines have in common."""

    checkpoint: Path
    folder: Path
    """Where `prepare` has laid the tokenizer and the baselines' own formats of the network."""
    beam_size: int
    length_penalty: float
    max_extra_tokens: int
    threads: int
    bundle: Path | None = None
    """What export has made of the checkpoint."""
    device: str = "cpu"
    """Of all engines alike: cuda where there is a GPU."""


class Turn(NamedTuple):
    """What an engine did with some sentences."""

    texts: list[str]
    num_tokens: int
    """Pieces of the best answers and their end symbols."""
    sentence_steps: int
    """Decoder steps, each times the sentences that were searched in it."""


class Engine(Protocol):
    """Text to text."""

    def translate(self, sentences: list[str]) -> Turn:
        """Translate; tokenization in and out included."""
        ...


def load_pieces(folder: Path) -> Any:
    """The tokenizer that `prepare` has laid there, as sentencepiece has it."""
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
