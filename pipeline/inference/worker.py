"""A process that translates for another one, which `parallel.py` starts."""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import torch
from tqdm import tqdm

from data_module.errors import InputError
from model.settings import DecodingSettings
from pipeline.inference.prefixes import Prefixes
from pipeline.inference.search_options import SearchOptions
from pipeline.inference.translator import Translator, load_on_device

_REPORT_SECONDS = 0.25
"""Least time between two reports of progress: in most steps of a search a few sentences end."""


@dataclass(frozen=True)
class Job:
    """What a process has to know before the first sentence."""

    checkpoint: Path
    """A checkpoint file."""
    device: str
    """`cpu`, or a GPU as `cuda:0`."""
    num_threads: int
    """Threads for work on the CPU."""
    options: SearchOptions


class Ready(NamedTuple):
    """The first answer: the model is loaded."""

    settings: DecodingSettings
    max_source_tokens: int | None
    prefixes: Prefixes


class Chunk(NamedTuple):
    """A request: lines to translate together.

    The answers are numbers of lines, each time some more have been translated, and at last the list of translations.
    """

    lines: list[str]
    n_best: int


def run_worker(job: Job, connection: Connection) -> None:
    """Translate chunks until the other process closes the connection or has ended, in whatever way.

    An InputError is an answer too, and so is a MemoryError, with one line. The process ends after either.
    """
    # A terminal sends Ctrl-C to this process as well, but the other process decides what to do.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Only the other process writes to the output, and its reader shall see the end of it.
    with suppress(OSError):  # Standard error may be closed.
        os.dup2(2, 1)
    # By default tqdm shares a lock with other processes, which a process that is killed leaves behind.
    tqdm.set_lock(threading.RLock())
    chunks: SimpleQueue[Chunk] = SimpleQueue()
    threading.Thread(target=_receive, args=(connection, chunks), daemon=True).start()
    try:
        _serve(job, chunks, connection)
    except InputError as error:
        connection.send(error)
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        connection.send(MemoryError(" ".join(str(error).split())[:200]))
    except ConnectionError:
        os._exit(0)


def _receive(connection: Connection, chunks: "SimpleQueue[Chunk]") -> None:
    """Pass chunks on, and end the process with the connection, whatever the process is doing then."""
    try:
        while True:
            chunks.put(connection.recv())
    except (EOFError, OSError):
        os._exit(0)


def _serve(job: Job, chunks: "SimpleQueue[Chunk]", connection: Connection) -> None:
    torch.set_num_threads(job.num_threads)
    if job.device != "cpu":
        # Otherwise PyTorch takes memory of the first GPU too.
        torch.cuda.set_device(torch.device(job.device))
    translator = load_on_device(job.checkpoint, job.device, job.options)
    connection.send(Ready(translator.settings, translator.max_source_tokens, translator.prefixes))
    while True:
        connection.send(_translate(translator, chunks.get(), connection.send))


def _translate(translator: Translator, chunk: Chunk, report: Callable[[int], object]) -> object:
    count, last = 0, time.monotonic()

    def finished(more: int) -> None:
        nonlocal count, last
        count, now = count + more, time.monotonic()
        if now - last >= _REPORT_SECONDS:
            report(count)
            count, last = 0, now

    return translator.translate(chunk.lines, chunk.n_best, finished=finished)


def _is_out_of_memory(error: Exception) -> bool:
    # PyTorch has a class of its own for GPUs only.
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
