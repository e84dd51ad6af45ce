"""Sentences -> translations: one line for each line, in order, an empty one for an empty one.

Reads standard input or --input; says on standard error which checkpoint of a run folder it took.
"""

import argparse
import gzip
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from pipeline.translator import Translation, Translator

CHUNK = 512
"""Lines translated together: enough for batches of like length, few enough for flat memory and a moving bar."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("checkpoint", type=Path, help="a .ckpt file or a run folder")
    parser.add_argument("--input", type=Path, help="a file of sentences (plain or .gz); standard input if not given")
    parser.add_argument("--beam", type=int, help="open hypotheses; 1 is greedy; the recipe's unless given")
    parser.add_argument("--length-penalty", type=float, help="alpha; the recipe's unless given")


def run(arguments: argparse.Namespace) -> int:
    """Translate until the input ends."""
    from pipeline.translator import load_translator

    # Opened first: a missing file should not wait for the network.
    stream = open_text(arguments.input) if arguments.input else sys.stdin.buffer
    translator = load_translator(arguments.checkpoint, arguments.beam, arguments.length_penalty)
    # A person who types wants each answer at once.
    chunk = 1 if stream.isatty() else CHUNK
    for number, translation in enumerate(translated(translator, sentences(stream), chunk), 1):
        if translation.truncated:
            tokens = f"{translation.num_source_tokens} tokens are more than the {translator.max_source_tokens}"
            print(f"line {number}: its {tokens} that the network reads; the rest was cut", file=sys.stderr)
        print(translation.text, flush=chunk == 1)
    return 0


def translated(translator: "Translator", lines: Iterable[str], chunk: int) -> Iterator["Translation"]:
    """Translations in order, a chunk of lines at a time, with a progress bar after two seconds of work."""
    from tqdm import tqdm

    lines = iter(lines)
    with tqdm(desc="translating", unit=" sentences", delay=2, disable=chunk == 1) as bar:
        while batch := list(islice(lines, chunk)):
            yield from translator.translate(batch)
            bar.update(len(batch))


def open_text(path: Path) -> BinaryIO:
    """A file to read lines from, decompressed if it ends in .gz.

    Raises InputError when it cannot be opened.
    """
    from data_module.errors import InputError

    try:
        path.open("rb").close()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); give a text file") from None
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def sentences(stream: BinaryIO) -> Iterator[str]:
    """Lines as text. Only a line feed ends one; what is no UTF-8 is replaced."""
    for line in stream:
        yield line.rstrip(b"\n").removesuffix(b"\r").decode("utf-8", errors="replace")


def read_sentences(path: Path) -> list[str]:
    """All lines of a file; raises InputError when it cannot be read."""
    with open_text(path) as stream:
        return list(sentences(stream))
