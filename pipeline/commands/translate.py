"""Translate sentences: one output line for each input line, in order; an empty line stays empty.

Reads --source or standard input. Standard error names the checkpoint that was chosen from a run folder, and at the end
the number of lines that were not UTF-8, were cut, lack a prefix, have characters or pieces that training never had or
have U+2581, with the first three of them. With --n-best, up to N translations are printed for a line, best first,
each after the line's number and a tab. With --scores, each translation follows its score (log-probability divided by
the length penalty) and a tab. With --sample, translations are drawn at random, each by the seed and the number of its
line.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BufferedReader, FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from data_module.files import user_path
from data_module.text_files import open_file, text_reader
from pipeline.inference.options import (
    SearchOptions,
    add_prefix_argument,
    add_sampling_arguments,
    add_search_arguments,
    given_sampling,
    with_prefix,
)
from pipeline.inference.text_io import CHUNK, SentenceWarnings, count_lines, sentences

if TYPE_CHECKING:
    from pipeline.inference.translator import LineTranslator


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("checkpoint", type=user_path, help="a .ckpt file, a run folder or a bundle")
    parser.add_argument("--source", type=user_path, help="a file of sentences, plain or .gz (default: standard input)")
    add_prefix_argument(parser)
    add_search_arguments(parser)
    add_sampling_arguments(parser)
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
    """Translate until the input ends; the exit code is 1 if memory ran out or a translation process ended before."""
    from data_module.errors import InputError
    from pipeline.inference.parallel import WorkerError, lacking_memory

    given_sampling(arguments)  # refuses what cannot be
    n_best = 1 if arguments.n_best is None else arguments.n_best
    if n_best < 1:
        raise InputError(f"--n-best {n_best}: must be 1 or more")
    if arguments.output and not arguments.source:
        raise InputError("--output: needs --source; without it, redirect standard output (> FILE)")
    if arguments.shard_lines is not None and not arguments.output:
        raise InputError("--shard-lines: is for --output; add that, or omit it")
    # Before the checkpoint is loaded, so that a missing file is reported at once.
    stream = open_file(arguments.source) if arguments.source else _standard_input()
    # Someone who types sentences needs each translation at once.
    chunk = 1 if stream.isatty() else CHUNK
    if arguments.output:
        stream.close()  # The file is opened again for each run of shards.
    try:
        with _translator(arguments, one_process=chunk == 1) as translator:
            if n_best > translator.settings.beam_size:
                beam = translator.settings.beam_size
                raise InputError(f"--n-best {n_best}: is more than the beam, {beam}; raise --beam")
            translator.prefixes.check(arguments.prefix)
            if arguments.output:
                _write_shards(arguments, translator)
            else:
                for _, text in _translated(arguments, translator, [(1, sentences(stream))], chunk):
                    print(text, end="", flush=chunk == 1)
                # Only here: where it has not ended, another thread may be reading from it.
                stream.close()
    except WorkerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (MemoryError, RuntimeError) as error:
        if (lacking := lacking_memory(error)) is None:
            raise
        print(f"error: out of memory ({lacking}); give a smaller --beam or --n-best", file=sys.stderr)
        return 1
    return 0


def _standard_input() -> BufferedReader:
    # Not sys.stdin: the interpreter cannot exit while another thread waits for input from that.
    file = FileIO(sys.stdin.fileno(), closefd=False)
    return text_reader(file, "standard input", file)


@contextmanager
def _translator(arguments: argparse.Namespace, one_process: bool) -> Iterator["LineTranslator"]:
    """Load the checkpoint, in this process or in one for each device."""
    from data_module.errors import InputError
    from pipeline.export.bundle import load_checkpoint_or_bundle
    from pipeline.export.bundle_folder import bundle_of
    from pipeline.inference.parallel import ParallelTranslator, choose_devices

    options = SearchOptions.given(arguments)
    if arguments.devices > 1 and not one_process and bundle_of(arguments.checkpoint) is not None:
        raise InputError(f"--devices {arguments.devices}: a bundle has one process; omit it, or give the checkpoint")
    devices = choose_devices(arguments.devices)
    if len(devices) == 1 or one_process:
        yield load_checkpoint_or_bundle(arguments.checkpoint, options)
        return
    with ParallelTranslator(arguments.checkpoint, devices, options) as translator:
        yield translator


_NOT_IN_TRANSLATIONS = {"checkpoint", "source", "output", "shard_lines", "devices", "overrides"}
"""Arguments that decide no translation, or whose contents are compared by themselves."""


def _write_shards(arguments: argparse.Namespace, translator: "LineTranslator") -> None:
    """Write the translations to `--output`, together with other processes that do the same."""
    from pipeline.inference.shards import Shards

    options = {name: value for name, value in vars(arguments).items() if name not in _NOT_IN_TRANSLATIONS}
    model = Path(translator.name)
    shard_lines = 4 * CHUNK if arguments.shard_lines is None else arguments.shard_lines
    shards = Shards(arguments.source, arguments.output, shard_lines, model, options)
    for number, text in _translated(arguments, translator, shards.runs(), CHUNK):
        shards.write(number, text)


def _translated(
    arguments: argparse.Namespace,
    translator: "LineTranslator",
    runs: Iterable[tuple[int, Iterable[str]]],
    chunk: int,
) -> Iterator[tuple[int, str]]:
    """Yield the number of each line, and what is printed for it.

    Args:
        runs: lines in succession, with the number of the first.
    """
    warnings = SentenceWarnings(translator.prefixes, translator.max_source_tokens)
    sampling, show = given_sampling(arguments), chunk > 1 and not arguments.output
    total = count_lines(arguments.source) if arguments.source and show else None
    for first, run in runs:
        lines = with_prefix(arguments.prefix, run)
        translations = translator.translate_lines(
            lines, chunk, arguments.n_best or 1, total, sampling=sampling, first=first, show=show
        )
        for number, translation in enumerate(translations, first):
            warnings.add(number, translation.defects)
            text = ""
            for hypothesis in translation.hypotheses:
                line_number = [] if arguments.n_best is None else [str(number)]
                score = [f"{hypothesis.score:.4f}"] if arguments.scores else []
                text += "\t".join([*line_number, *score, hypothesis.text]) + "\n"
            yield number, text
    warnings.print()
