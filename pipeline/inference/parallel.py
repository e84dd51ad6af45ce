"""Translation of a stream of lines by several processes of this machine, in the order of the lines.

Lines are dealt out in chunks, each to the next process that is free. The number of chunks that have been read and not
yet written is bounded, so memory does not grow with the text, and a slow reader of the output slows down the rest.
Processes end when their connection to this process closes, so none is left however this process ends.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from data_module.errors import InputError
from data_module.worker_processes import num_processors
from model.sampling import Sampling
from model.settings import DecodingSettings
from pipeline.inference.options import Prefixes, SearchOptions
from pipeline.inference.text_io import progress_bar, show_token_rate
from pipeline.inference.translator import Translation, Translator, announced_checkpoint, load_on_device

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
    sampling: Sampling | None
    first: int
    """Number of the first line in the text."""


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

    return translator.translate(*chunk, finished=finished)


def _is_out_of_memory(error: Exception) -> bool:
    # PyTorch has a class of its own for GPUs only.
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


_CHUNKS_PER_WORKER = 2
"""Chunks in memory for each process: one that it translates, and one that waits for it or for earlier ones."""


class WorkerError(Exception):
    """A translation process has ended or run out of memory. The message is one line that names it."""


def choose_devices(count: int) -> list[str]:
    """Return the device of each of `count` processes: GPUs, or the CPU for each where there is no GPU.

    Raises:
        InputError: there are not that many, or `count` is below 1.
    """
    if torch.cuda.is_available():
        available, units = torch.cuda.device_count(), "GPUs"
    else:
        available, units = num_processors(), "processors"
    if not 1 <= count <= available:
        units = units.removesuffix("s") if available == 1 else units
        raise InputError(f"--devices {count}: this process may use {available} {units}; give 1 to {available}")
    return [f"cuda:{index}" if units.startswith("GPU") else "cpu" for index in range(count)]


class _Progress(NamedTuple):
    num_sentences: int


class _Answer(NamedTuple):
    number: int
    translations: list[Translation]


class _End(NamedTuple):
    """The input has ended, or reading it has failed after `num_chunks` chunks."""

    num_chunks: int
    error: Exception | None


class _Worker:
    """A translation process, seen from the process that has started it."""

    def __init__(self, number: int, count: int, job: Job) -> None:
        place = "the CPU" if job.device == "cpu" else f"GPU {job.device.removeprefix('cuda:')}"
        self._name = f"translation process {number} of {count} on {place}"
        context = multiprocessing.get_context("spawn")
        self._connection: Connection
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=run_worker, args=(job, theirs), name=self._name, daemon=True)
        self._process.start()
        # Else the connection would not end with the process.
        theirs.close()

    def send(self, chunk: Chunk) -> None:
        """Send a chunk.

        Raises:
            WorkerError: the process has ended.
        """
        try:
            self._connection.send(chunk)
        except OSError:
            raise self._ended() from None

    def receive(self) -> Any:
        """Wait for the next answer and return it.

        Raises:
            InputError: the process has found a mistake of the user.
            WorkerError: the process has ended, or has no memory left.
        """
        try:
            answer = self._connection.recv()
        except (EOFError, OSError):
            raise self._ended() from None
        if isinstance(answer, MemoryError):
            raise WorkerError(f"{self._name} is out of memory ({answer}); give fewer --devices or a smaller --beam")
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _ended(self) -> WorkerError:
        self._process.join()
        code = self._process.exitcode or 0
        if code == -signal.SIGKILL:
            return WorkerError(f"{self._name} was killed by SIGKILL; if memory ran out, give fewer --devices")
        reason = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return WorkerError(f"{self._name} {reason}; what it wrote above says why")

    def kill(self) -> None:
        """End the process at once, and wait for that."""
        self._process.kill()
        self._process.join()


class ParallelTranslator:
    """Translates lines as `Translator.translate_lines` does, with a process for each device.

    Use it as a context manager: at its end no process is left.
    """

    def __init__(self, checkpoint: Path, devices: list[str], options: SearchOptions) -> None:
        """Start the processes, and wait until each has loaded the checkpoint.

        Args:
            checkpoint: a checkpoint or a run folder.
            devices: what `choose_devices` has returned.
            options: search settings in place of the recipe's.

        Raises:
            InputError: as `load_translator` does.
            WorkerError: a process has ended.
        """
        path = announced_checkpoint(checkpoint)
        self.name = str(path)
        # A device's share of the processors, but no more than one process would use, such as OMP_NUM_THREADS.
        num_threads = max(1, min(torch.get_num_threads(), num_processors() // len(devices)))
        self._workers: list[_Worker] = []
        try:
            with _interrupts_blocked():
                for number, device in enumerate(devices, 1):
                    job = Job(path, device, num_threads, options)
                    self._workers.append(_Worker(number, len(devices), job))
            models: list[Ready] = [worker.receive() for worker in self._workers]
        except BaseException:
            self.close()
            raise
        self.settings, self.max_source_tokens, self.prefixes = models[0]

    def __enter__(self) -> "ParallelTranslator":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        for worker in self._workers:
            worker.kill()

    def translate_lines(
        self,
        lines: Iterable[str],
        chunk: int,
        n_best: int = 1,
        total: int | None = None,
        *,
        sampling: Sampling | None = None,
        first: int = 1,
        show: bool = True,
    ) -> Iterator[Translation]:
        """Translate lines in order, `chunk` lines at a time.

        Lines are read in another thread, so that translations do not wait for lines that have yet to come.

        Args:
            lines: source lines. An error of theirs is raised after the translations of the chunks before it.
            chunk: number of lines translated together.
            n_best: number of hypotheses for each line.
            total: number of lines, if it is known, for the time left.
            sampling: how to draw each translation at random; None for a search.
            first: number of the first line in its text, which samples depend on.
            show: whether to show a progress bar.

        Raises:
            WorkerError: a process has ended or run out of memory.
        """
        stream = _Stream(self._workers, _chunks(iter(lines), chunk, n_best, sampling, first))
        num_tokens = written = 0
        finished: dict[int, list[Translation]] = {}
        end: _End | None = None
        try:
            with progress_bar(total, show=show, smoothing=0) as bar:
                while end is None or written < end.num_chunks:
                    event = stream.events.get()
                    if isinstance(event, _Progress):
                        bar.update(event.num_sentences)
                    elif isinstance(event, _End):
                        end = event
                    elif isinstance(event, _Answer):
                        finished[event.number] = event.translations
                        num_tokens += sum(translation.hypotheses[0].num_tokens for translation in event.translations)
                        show_token_rate(bar, num_tokens)
                    else:
                        raise event
                    while written in finished:
                        yield from finished.pop(written)
                        written += 1
                        stream.room.release()
            if end.error is not None:
                raise end.error
        finally:
            stream.stop()


def _chunks(lines: Iterator[str], size: int, n_best: int, sampling: Sampling | None, first: int) -> Iterator[Chunk]:
    while batch := list(islice(lines, size)):
        yield Chunk(batch, n_best, sampling, first)
        first += len(batch)


class _Stream:
    """The threads between the input, the processes and the one that writes: one reads, one waits for each process."""

    def __init__(self, workers: list[_Worker], chunks: Iterator[Chunk]) -> None:
        self.events: SimpleQueue[_Progress | _Answer | _End | Exception] = SimpleQueue()
        """What has happened, for the thread that writes."""
        self.room = threading.Semaphore(_CHUNKS_PER_WORKER * len(workers))
        """How many more chunks may be read. The thread that writes releases it for each chunk."""
        self._chunks: SimpleQueue[tuple[int, Chunk] | None] = SimpleQueue()
        self._num_workers = len(workers)
        self._stopped = False
        # Daemons: where one waits for input that does not come, the program can end.
        threading.Thread(target=self._read, args=(chunks,), daemon=True).start()
        for worker in workers:
            threading.Thread(target=self._translate, args=(worker,), daemon=True).start()

    def stop(self) -> None:
        """Let the threads end when what they wait for has happened."""
        self._stopped = True
        self.room.release()
        for _ in range(self._num_workers):
            self._chunks.put(None)

    def _read(self, chunks: Iterator[Chunk]) -> None:
        count, error = 0, None
        try:
            while self.room.acquire() and not self._stopped and (chunk := next(chunks, None)):
                self._chunks.put((count, chunk))
                count += 1
        except Exception as failure:
            error = failure
        self.events.put(_End(count, error))

    def _translate(self, worker: _Worker) -> None:
        try:
            while (item := self._chunks.get()) is not None:
                number, chunk = item
                worker.send(chunk)
                reported = 0
                while isinstance(answer := worker.receive(), int):
                    reported += answer
                    self.events.put(_Progress(answer))
                self.events.put(_Progress(len(chunk.lines) - reported))
                self.events.put(_Answer(number, answer))
        except Exception as error:
            self.events.put(error)


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block Ctrl-C: processes that are started inside never receive it, and this one does at the end."""
    # Its start would unblock the signal.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
