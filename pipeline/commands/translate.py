"""Sentences -> translations: one line for each line, in order, an empty one for an empty one.

Reads standard input or --input; says on standard error which checkpoint of a run folder it took, and which lines it
could not read or translate whole. With --n-best a line gets up to N, the best first, each with its line's number and a
tab before it; with --scores its score and a tab (log-probability over length penalty).
"""

import argparse
import gzip
import sys
import zlib
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from pipeline.inference.translator import Translation, Translator

CHUNK = 512
"""Lines translated together: enough for batches of like length, few enough for flat memory and a moving bar."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("checkpoint", type=Path, help="a .ckpt file or a run folder")
    parser.add_argument("--input", type=Path, help="a file of sentences (plain or .gz); standard input if not given")
    parser.add_argument("--beam", type=int, help="open hypotheses; 1 is greedy; the recipe's unless given")
    parser.add_argument("--length-penalty", type=float, help="alpha; the recipe's unless given")
    parser.add_argument("--n-best", type=int, metavar="N", help="give the N best of each, N at most the beam")
    parser.add_argument("--scores", action="store_true", help="give each translation's score")


def run(arguments: argparse.Namespace) -> int:
    """Translate until the input ends."""
    from data_module.errors import InputError
    from pipeline.inference.translator import load_translator

    n_best = 1 if arguments.n_best is None else arguments.n_best
    if n_best < 1:
        raise InputError(f"--n-best {n_best}: must be 1 or more")
    # Opened first: a missing file should not wait for the network.
    stream = open_text(arguments.input) if arguments.input else sys.stdin.buffer
    translator = load_translator(arguments.checkpoint, arguments.beam, arguments.length_penalty)
    if n_best > translator.settings.beam_size:
        raise InputError(f"--n-best {n_best}: is more than the beam, {translator.settings.beam_size}; raise --beam")
    # A person who types wants each answer at once.
    chunk = 1 if stream.isatty() else CHUNK
    for number, translation in enumerate(translated(translator, sentences(stream), chunk, n_best), 1):
        if translation.truncated:
            tokens = f"{translation.num_source_tokens} tokens are more than the {translator.max_source_tokens}"
            warn(number, f"its {tokens} that the network reads; the rest was cut")
        for hypothesis in translation.hypotheses:
            place = [] if arguments.n_best is None else [str(number)]
            score = [f"{hypothesis.score:.4f}"] if arguments.scores else []
            print(*place, *score, hypothesis.text, sep="\t", flush=chunk == 1)
    return 0


def translated(translator: "Translator", lines: Iterable[str], chunk: int, n_best: int = 1) -> Iterator["Translation"]:
    """Translations in order, a chunk of lines at a time, with a progress bar after two seconds of work."""
    from tqdm import tqdm

    lines = iter(lines)
    # A log gets a line every half minute instead of a bar.
    interval = 0.1 if sys.stderr.isatty() else 30.0
    with tqdm(desc="translating", unit=" sentences", delay=2, mininterval=interval, disable=chunk == 1) as bar:
        while batch := list(islice(lines, chunk)):
            yield from translator.translate(batch, n_best)
            bar.update(len(batch))


def warn(number: int, message: str, name: str = "") -> None:
    """Say on standard error what is the matter with a line, of a file if there are several."""
    from tqdm import tqdm

    tqdm.write(f"{name}{':' if name else 'line '}{number}: {message}", file=sys.stderr)


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


def sentences(stream: BinaryIO, name: str = "") -> Iterator[str]:
    """Lines as text. Only a line feed ends one; what is no UTF-8 is replaced, and warned of.

    Raises InputError where a compressed file is damaged.
    """
    for number, line in enumerate(_whole_lines(stream, name), 1):
        line = line.removesuffix(b"\n").removesuffix(b"\r")
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        try:
            yield line.decode()
        except UnicodeDecodeError:
            warn(number, "is not valid UTF-8; what could not be read was replaced", name)
            yield line.decode(errors="replace")


def _whole_lines(stream: BinaryIO, name: str) -> Iterator[bytes]:
    from data_module.errors import InputError

    try:
        yield from stream
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        what = name or getattr(stream, "name", "the input")
        raise InputError(f"{what}: is no gzip file or a damaged one ({error}); copy it again or rename it") from None


def read_sentences(path: Path) -> list[str]:
    """All lines of a file; raises InputError when it cannot be read."""
    with open_text(path) as stream:
        return list(sentences(stream, str(path)))
