"""Translation of a stream of lines by several processes of this machine, in the order of the lines.

Lines are dealt out in chunks, each to the next process that is free. The number of chunks that have been read and not
yet written is bounded, so memory does not grow with the text, and a slow reader of the output slows down the rest. No
process is left, however this one ends.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any

import torch
from tqdm import tqdm

from data_module.errors import InputError
from data_module.worker_processes import num_processors
from pipeline.inference.options import SearchOptions
from pipeline.inference.translator import Chunk, LineTranslator, Translation, announced_checkpoint, load_on_device

_CHUNKS_PER_WORKER = 2
"""Chunks in memory for each process: one that it translates, and one that waits for it or for earlier ones."""


def run_worker(checkpoint: Path, device: str, num_threads: int, options: SearchOptions, connection: Connection) -> None:
    """Translate chunks until the other process ends, in whatever way.

    The first answer describes the model, and each other one is the list of a chunk's translations. An InputError is an
    answer too, and so is a MemoryError, with one line. The process ends after either.

    Args:
        checkpoint: a checkpoint file.
        device: `cpu`, or a GPU as `cuda:0`.
        num_threads: threads for work on the CPU.
        options: search settings in place of the recipe's.
        connection: the other process sends chunks by it, and gets the answers.
    """
    # A terminal sends Ctrl-C to this process as well, but the other process decides what to do.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Only the other process writes to the output, and its reader shall see the end of it.
    with suppress(OSError):  # Standard error may be closed.
        os.dup2(2, 1)
    # By default tqdm shares a lock with other processes, which a process that is killed leaves behind.
    tqdm.set_lock(threading.RLock())
    torch.set_num_threads(num_threads)
    try:
        if device != "cpu":
            # Otherwise PyTorch takes memory of the first GPU too.
            torch.cuda.set_device(torch.device(device))
        translator = load_on_device(checkpoint, device, options)
        connection.send((translator.settings, translator.max_source_tokens, translator.prefixes))
        while True:
            connection.send(translator.translate(*connection.recv()))
    except InputError as error:
        connection.send(error)
    except (MemoryError, RuntimeError) as error:
        if (lacking := lacking_memory(error)) is None:
            raise
        connection.send(MemoryError(lacking))
    except (EOFError, ConnectionError):
        pass  # The other process has ended.


def lacking_memory(error: Exception) -> str | None:
    """Return the message of an out-of-memory error in one line; None for another error."""
    # PyTorch has a class of its own for GPUs only.
    is_of_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return " ".join(str(error).split())[:200] if is_of_memory or "can't allocate memory" in str(error) else None


def _end_with_parent() -> None:
    """End this process with the one that started it, whatever this one is doing then."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(0)


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


class _Worker:
    """A translation process, seen from the process that has started it."""

    def __init__(self, name: str, *job: Any) -> None:
        """Start the process; `job` are the arguments of `run_worker` without the connection."""
        self._name = name
        context = multiprocessing.get_context("spawn")
        self._connection: Connection
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=run_worker, args=(*job, theirs), name=name, daemon=True)
        self._process.start()
        # Else the connection would not end with the process.
        theirs.close()

    def translate(self, chunk: Chunk) -> list[Translation]:
        """Translate a chunk; see `receive` for errors."""
        with suppress(OSError):  # `receive` says how the process has ended.
            self._connection.send(chunk)
        translations: list[Translation] = self.receive()
        return translations

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


class ParallelTranslator(LineTranslator):
    """Translates lines as a `Translator` does, with a process for each device.

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
                    place = "the CPU" if device == "cpu" else f"GPU {device.removeprefix('cuda:')}"
                    name = f"translation process {number} of {len(devices)} on {place}"
                    self._workers.append(_Worker(name, path, device, num_threads, options))
            models = [worker.receive() for worker in self._workers]
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

    def _translate_chunks(self, chunks: Iterator[Chunk], bar: Any) -> Iterator[list[Translation]]:
        room = threading.Semaphore(_CHUNKS_PER_WORKER * len(self._workers))
        futures: SimpleQueue[Future[list[Translation]] | None] = SimpleQueue()
        free: SimpleQueue[_Worker] = SimpleQueue()
        for worker in self._workers:
            free.put(worker)
        pool, stopped = ThreadPoolExecutor(len(self._workers)), threading.Event()

        def translate(work: Chunk) -> list[Translation]:
            worker = free.get()
            try:
                return worker.translate(work)
            finally:
                free.put(worker)

        def read() -> None:
            try:
                while room.acquire() and not stopped.is_set() and (work := next(chunks, None)) is not None:
                    futures.put(pool.submit(translate, work))
                futures.put(None)
            except Exception as error:
                failed: Future[list[Translation]] = Future()
                failed.set_exception(error)
                futures.put(failed)

        # Not the thread that writes, as translations shall not wait for lines that have yet to come; and a daemon, as
        # the program may end before they come.
        threading.Thread(target=read, daemon=True).start()
        try:
            while (future := futures.get()) is not None:
                translations = future.result()
                bar.update(len(translations))
                yield translations
                room.release()
        finally:
            stopped.set()
            room.release()
            pool.shutdown(wait=False, cancel_futures=True)


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
