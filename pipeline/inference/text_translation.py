"""Translation of a text by one process or by several, to standard output or to a file."""

import argparse
import shutil
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from io import BufferedReader
from pathlib import Path
from tempfile import TemporaryDirectory

from data_module.corpus.pairs import fingerprint
from pipeline.inference.loading import chosen_file, load_file
from pipeline.inference.options import SearchOptions, with_prefix
from pipeline.inference.processes import choose_devices, run_on_devices
from pipeline.inference.shards import Shards, Task
from pipeline.inference.text_io import (
    CHUNK,
    SentenceWarnings,
    count_lines,
    require_target_prefixes,
    sentences,
    target_prefixes,
)
from pipeline.inference.translator import Translator
from pipeline.runtime.console import Failure, report

_NOT_IN_TRANSLATIONS = {"checkpoint", "source", "output", "shard_lines", "devices", "overrides"}
_NOT_IN_TRANSLATIONS |= {"target_prefixes", "interactive"}
"""Arguments that do not change translations, or that name files whose contents are compared."""


def translate_text(arguments: argparse.Namespace, options: SearchOptions, stream: BufferedReader) -> None:
    """Translate until the input ends.

    Raises Failure if a process was killed or has failed, MemoryError or RuntimeError if memory has run out.
    """
    devices = choose_devices(arguments.devices)
    # Chosen once for all processes, because a training run may write a newer checkpoint meanwhile.
    arguments.checkpoint = chosen_file(arguments.checkpoint)
    if arguments.output is None and (len(devices) == 1 or stream.isatty()):
        _print_translations(arguments, options, stream)
        return
    try:
        with _task(arguments, stream) as task:
            run_on_devices(partial(_translate_shards, arguments, options, task), devices)
    except ChildProcessError as error:
        raise Failure(str(error)) from None


def _print_translations(arguments: argparse.Namespace, options: SearchOptions, stream: BufferedReader) -> None:
    translator = _load(arguments, options)
    # A user who types sentences needs each translation at once.
    chunk = 1 if stream.isatty() or arguments.interactive else CHUNK
    total = count_lines(arguments.source) if arguments.source and chunk > 1 else None
    lines, number = [(1, sentences(stream))], 0
    texts = _translated(arguments, options, translator, lines, chunk=chunk, total=total, show=chunk > 1)
    for number, text in texts:  # noqa: B007 - the last one is read below
        print(text, end="", flush=chunk == 1)
    if arguments.target_prefixes and not arguments.source:
        require_target_prefixes(arguments.target_prefixes, number, "standard input")


@contextmanager
def _task(arguments: argparse.Namespace, stream: BufferedReader) -> Iterator[Task]:
    """Yield the task of translating `--source` to `--output`.

    Without `--output`, text and translations are in a private folder, and the translations are printed at the end.
    """
    compared = {name: value for name, value in vars(arguments).items() if name not in _NOT_IN_TRANSLATIONS}
    if path := arguments.target_prefixes:
        compared["target_prefixes"] = fingerprint(str(path), path)["sha256"]
    shard_lines = 4 * CHUNK if arguments.shard_lines is None else arguments.shard_lines
    task = Task(arguments.source, arguments.output, shard_lines, compared, arguments.devices)
    if arguments.output is not None:
        stream.close()  # The file is opened again for each run of shards.
        yield task
        return
    # Remove the folder even if the command is terminated, as by a job's time limit.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with TemporaryDirectory(prefix="translation-") as folder:
        source, output = Path(folder, "source"), Path(folder, "output")
        with stream, source.open("wb") as file:
            shutil.copyfileobj(stream, file)
        if arguments.target_prefixes:
            require_target_prefixes(arguments.target_prefixes, source, "the text")
        size = 3 * source.stat().st_size / 1e6  # with its translations, in shards and joined
        report(f"{folder}: takes about {size:,.1f} MB until all translations are done")
        yield replace(task, source=source, output=output, shard_lines=CHUNK, is_private=True)
        with output.open("rb") as translations:
            shutil.copyfileobj(translations, sys.stdout.buffer)
            sys.stdout.buffer.flush()


def _translate_shards(
    arguments: argparse.Namespace, options: SearchOptions, task: Task, device: str, number: int
) -> None:
    """Translate the shards that other processes leave to this one, until all are done."""
    translator = _load(arguments, options, device)
    shards = Shards(task, Path(translator.name), number)
    for line, text in _translated(arguments, options, translator, shards.runs(), show=number == 0):
        shards.write(line, text)


def _load(arguments: argparse.Namespace, options: SearchOptions, device: str | None = None) -> Translator:
    """Load the model, and check that it supports the options."""
    translator = load_file(arguments.checkpoint, device)
    options.in_place_of(translator.settings)
    translator.prefixes.require(arguments.prefix)
    return translator


def _translated(
    arguments: argparse.Namespace,
    options: SearchOptions,
    translator: Translator,
    runs: Iterable[tuple[int, Iterable[str]]],
    *,
    chunk: int = CHUNK,
    total: int | None = None,
    show: bool = False,
) -> Iterator[tuple[int, str]]:
    """Yield the number of each line, and the text to print for it.

    A run has consecutive lines and the number of the first; see `Translator.translate_lines` for the last arguments.
    """
    warnings = SentenceWarnings(translator.prefixes, translator.max_source_tokens)
    for first, run in runs:
        lines = (with_prefix(arguments.prefix, one) for one in run)
        prefixes = target_prefixes(arguments.target_prefix, arguments.target_prefixes, first)
        translations = translator.translate_lines(
            lines, chunk, options, first, target_prefixes=prefixes, total=total, show=show
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
