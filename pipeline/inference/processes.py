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
from data_module.system.worker_processes import ignore_signals, num_processors, signals_blocked
from pipeline.runtime.console import drop_unread_output, lacking_memory, user_message

Work = Callable[[str, int], None]
"""The work of a process: takes a device (`cpu`, or a GPU as `cuda:0`) and the process's number from 0."""


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
    """Run `work` in a process for each device, or in this one for a single device; if one fails, end the others.

    Raises what `work` raises. From another process that is InputError for a mistake of the user, MemoryError, or
    ChildProcessError if the process was killed or has failed otherwise.
    """
    if len(devices) == 1:
        work(devices[0], 0)
        return
    context = multiprocessing.get_context("spawn")
    processes: dict[Any, BaseProcess] = {}
    resource_tracker.ensure_running()  # now, because its start would unblock signals below
    try:
        with signals_blocked():
            for number, device in enumerate(devices):
                ours, theirs = context.Pipe(duplex=False)
                name = f"translation process {number + 1} of {len(devices)} ({device})"
                job = work, devices, number, theirs
                processes[ours] = context.Process(target=_run, args=job, name=name, daemon=True)
                processes[ours].start()
                theirs.close()  # Otherwise the pipe would stay open when the process ends.
        while processes:
            ready: list[Any] = wait(list(processes))
            for answer in ready:
                with suppress(EOFError):
                    raise answer.recv()
                process = processes.pop(answer)
                process.join()
                if code := process.exitcode:
                    ending = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                    way_out = "see what it wrote above, and give fewer --devices if memory ran out"
                    raise ChildProcessError(f"{process.name} ended with {ending}; {way_out}")
    finally:
        for process in processes.values():
            process.kill()
            process.join()


def _run(work: Work, devices: list[str], number: int, answer: Connection) -> None:
    """Do the work in a process of its own, and send an error that the user can act on."""
    drop_unread_output()
    ignore_signals(number)  # The parent process handles Ctrl-C. If it ends, in whatever way, this process ends too.
    tqdm.set_lock(threading.RLock())  # Its default is a semaphore, which outlives a process that is killed.
    # A device's share of the processors, but no more threads than PyTorch has by itself, such as by OMP_NUM_THREADS.
    torch.set_num_threads(max(1, min(torch.get_num_threads(), num_processors() // len(devices))))
    try:
        if devices[number] != "cpu":
            torch.cuda.set_device(devices[number])  # Otherwise PyTorch would allocate memory on the first GPU too.
        work(devices[number], number)
    except Exception as error:
        lacking, line = lacking_memory(error), user_message(error)
        if lacking is None and line is None:
            raise
        answer.send(InputError(line) if lacking is None else MemoryError(lacking))
