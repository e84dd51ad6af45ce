"""Translate sentences: one output line for each input line, in order; an empty line stays empty.

Reads --source or standard input; a pipe is read in chunks of 2,048 lines, unless --interactive is given. Standard error
names the checkpoint that was chosen from a run folder. At the end it reports the number of lines with each defect, and
the first three of them: lines that were not UTF-8, were cut, lack a prefix, have U+2581, or have characters or pieces
that training never saw.

With --n-best, up to N translations are printed for a line, best first, each after the line's number and a tab. With
--scores, each translation follows its score (log-probability divided by the length penalty) and a tab. With --sample,
translations are drawn at random, each from the seed and the number of its line. With --target-prefix or
--target-prefixes, translations begin with a given text.
"""

import argparse
import sys
from dataclasses import replace
from io import FileIO

from data_module.errors import InputError
from data_module.system.files import user_path
from data_module.system.text_files import open_file, text_reader
from pipeline.inference.file_options import check_files
from pipeline.inference.options import (
    SearchOptions,
    add_prefix_argument,
    add_sampling_arguments,
    add_search_arguments,
    given_sampling,
)
from pipeline.inference.text_io import CHUNK, require_target_prefixes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("checkpoint", type=user_path, help="a .ckpt file, a run folder or a bundle")
    parser.add_argument("--source", type=user_path, help="a file of sentences, plain or .gz (default: standard input)")
    add_prefix_argument(parser)
    add_search_arguments(parser)
    add_sampling_arguments(parser)
    parser.add_argument("--target-prefix", metavar="TEXT", help="begin each translation with this text")
    parser.add_argument(
        "--target-prefixes",
        type=user_path,
        metavar="FILE",
        help="begin the translation of each line with the text of the same line of FILE, or with anything if that is "
        "empty",
    )
    parser.add_argument("--n-best", type=int, metavar="N", help="print the N best translations; at most the beam size")
    parser.add_argument(
        "--devices",
        type=int,
        default=1,
        metavar="N",
        help="translate with N processes: on N GPUs, or without a GPU on N equal parts of the processors (default: 1)",
    )
    parser.add_argument("--scores", action="store_true", help="print the score of each translation")
    parser.add_argument(
        "--interactive",
        action="store_true",
        help="translate each line as soon as it is read, as in a terminal, for a program that waits for each answer",
    )
    parser.add_argument(
        "--output",
        type=user_path,
        help="write the translations of --source to this file; the same command, stopped and run again, or run by "
        "several processes at once, translates what is missing",
    )
    parser.add_argument(
        "--shard-lines",
        type=int,
        metavar="N",
        help=f"with --output, write N lines at a time, a multiple of {CHUNK} (default: {4 * CHUNK})",
    )


def run(arguments: argparse.Namespace) -> int:
    """Check the options and open the text, then translate."""
    n_best = 1 if arguments.n_best is None else arguments.n_best
    options = replace(SearchOptions.given(arguments), n_best=n_best, sampling=given_sampling(arguments))
    if arguments.output and not arguments.source:
        raise InputError("--output: needs --source; without it, redirect standard output (> FILE)")
    for option, given in (("--output", arguments.output), ("--devices", arguments.devices > 1)):
        if arguments.interactive and given:
            raise InputError(f"{option}: is for whole texts; omit it, or --interactive, which answers line by line")
    if arguments.shard_lines is not None and not arguments.output:
        raise InputError("--shard-lines: is for --output; add that, or omit it")
    check_files(arguments)
    if arguments.target_prefixes is not None:
        if arguments.target_prefix is not None:
            raise InputError("--target-prefixes: gives each line its own; omit it, or --target-prefix")
        require_target_prefixes(arguments.target_prefixes, arguments.source, str(arguments.source))
    # Before the checkpoint is loaded, so that a missing file is reported at once.
    if arguments.source:
        stream = open_file(arguments.source)
    else:
        file = FileIO(sys.stdin.fileno(), closefd=False)
        stream = text_reader(file, "standard input", file)
    from pipeline.inference.text_translation import translate_text  # torch

    translate_text(arguments, options, stream)
    return 0
