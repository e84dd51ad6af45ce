"""Sentences -> translations: one line for each line, in order, an empty one for an empty one.

Reads standard input or --input; says on standard error which checkpoint of a run folder it took, and which lines it
could not read or translate whole. With --n-best a line gets up to N, the best first, each with its line's number and a
tab before it; with --scores its score and a tab (log-probability over length penalty).
"""

import argparse
import sys
from pathlib import Path

from pipeline.inference.text_io import CHUNK, open_text, sentences, translated, warn


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
