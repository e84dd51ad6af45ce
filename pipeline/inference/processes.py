"""Runs a process on each of several devices. No process is left, however this one ends."""

import multiprocessing
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from tqdm import tqdm

from data_module.errors import InputError
from data_module.worker_processes import ignore_signals, num_processors, signals_blocked
from pipeline.runtime.console import user_message

Work = Callable[[str, int], None]
"""The work of a process: takes a device (`cpu`, or a GPU as `cuda:0`) and the process's number from 0."""


class WorkerError(Exception):
    """A process has failed. The message is one line that names it."""


def choose_devices(count: int) -> list[str]:
    """Return the device of each of `count` processes: GPUs, or the CPU for each where there is no GPU.

    Raises InputError if there are fewer devices than `count`, or `count` is below 1.
    """
    on_gpus = torch.cuda.is_available()
    available = torch.cuda.device_count() if on_gpus else num_processors()
    if not 1 <= count <= available:
        units = ("GPU" if on_gpus else "processor") + "s" * (available > 1)
        raise InputError(f"--devices {count}: this process may use {available} {units}; give 1 to {available}")
    return [f"cuda:{index}" if on_gpus else "cpu" for index in range(count)]


def run_on_devices(work: Work, devices: list[str]) -> None:
    """Run `work` in a process for each device, and wait until all have ended; if one fails, end the others.

    Raises:
        InputError: a process has found a mistake of the user.
        WorkerError: a process was killed, ran out of memory, or has failed otherwise.
    """
    # A device's share of the processors, but no more threads than this process has, such as by OMP_NUM_THREADS.
    num_threads = max(1, min(torch.get_num_threads(), num_processors() // len(devices)))
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    answers: dict[Any, tuple[BaseProcess, Connection]] = {}
    # Started now, because its start would unblock signals below.
    resource_tracker.ensure_running()
    try:
        with signals_blocked():
            for number, device in enumerate(devices):
                ours, theirs = context.Pipe(duplex=False)
                place = "the CPU" if device == "cpu" else f"GPU {device.removeprefix('cuda:')}"
                name = f"translation process {number + 1} of {len(devices)} on {place}"
                job = (work, device, number, num_threads, theirs)
                processes.append(context.Process(target=_run, args=job, name=name, daemon=True))
                processes[-1].start()
                answers[processes[-1].sentinel] = processes[-1], ours
                # Otherwise the pipe would stay open when the process ends.
                theirs.close()
        while answers:
            for sentinel in wait(list(answers)):
                _raise_failure(*answers.pop(sentinel))
    finally:
        for process in processes:
            process.kill()
            process.join()


def _run(work: Work, device: str, number: int, num_threads: int, answer: Connection) -> None:
    """Do the work in a process of its own, and send errors that the user can act on."""
    # The parent process handles Ctrl-C. If it ends, in whatever way, this process ends too.
    ignore_signals(number)
    # By default tqdm shares a lock among processes, which stays locked if its owner is killed.
    tqdm.set_lock(threading.RLock())
    torch.set_num_threads(num_threads)
    try:
        if device != "cpu":
            # Otherwise PyTorch would allocate memory on the first GPU too.
            torch.cuda.set_device(torch.device(device))
        work(device, number)
    except Exception as error:
        if lacking := lacking_memory(error):
            name = multiprocessing.current_process().name
            answer.send(WorkerError(f"{name} is out of memory ({lacking}); give fewer --devices or a smaller --beam"))
        elif line := user_message(error):
            answer.send(InputError(line))
        else:
            raise


def _raise_failure(process: BaseProcess, answer: Connection) -> None:
    """Raise the error of a process that has ended, if it failed."""
    process.join()
    with suppress(EOFError):
        raise answer.recv()
    code = process.exitcode or 0
    if code == -signal.SIGKILL:
        raise WorkerError(f"{process.name} was killed by SIGKILL; if memory ran out, give fewer --devices")
    if code:
        reason = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        raise WorkerError(f"{process.name} {reason}; what it wrote above says why")


def lacking_memory(error: Exception) -> str | None:
    """Return the message of an out-of-memory error in one line; None for another error."""
    # PyTorch has a class for this error only on GPUs.
    is_of_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return " ".join(str(error).split())[:200] if is_of_memory or "can't allocate memory" in str(error) else None
