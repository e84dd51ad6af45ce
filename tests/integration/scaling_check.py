"""The model behind `benchmark scaling` against real runs: `python -m tests.integration.scaling_check RECIPE`.

RECIPE is trained by `fit` on one CPU process and on two, a thread each, on one batch and on a batch a process. How
long an all-reduce of two gloo processes takes is measured first. Two processes on one machine also share its memory
and caches, so one is timed both alone and beside another that trains on its own. The last line is one JSON object.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from pipeline.benchmark.report import rounded
from pipeline.benchmark.scaling_model import Link
from pipeline.recipe import load_recipe
from tests.conftest import ROOT
from tests.integration.runs import scalars

ROUNDS, STEPS, EVERY = 3, 16, 4
SMALL, LARGE = 4096, 25 << 20
"""Bytes: of an all-reduce that is all latency, and of one of DDP's buckets."""


def _all_reduce(rank: int, port: int, answers: "mp.SimpleQueue[list[float]]") -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    seconds = []
    for size in (SMALL, LARGE):
        gradients, times = torch.zeros(size // 4), []
        for _ in range(30):
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(gradients)
            times.append(time.perf_counter() - began)
        seconds.append(median(times[5:]))
    if rank == 0:
        answers.put(seconds)
    dist.destroy_process_group()


def gloo_link() -> Link:
    """What two processes reach: a ring of two sends all bytes once, in two hops."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answers: mp.SimpleQueue[list[float]] = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_all_reduce, (port, answers), nprocs=2)
    small, large = answers.get()
    return Link(LARGE / (large - small), small / 2)


def together(*commands: list[object]) -> list[str]:
    """What the commands print, all running at once, a thread a process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "pipeline", *map(str, command)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for command in commands
    ]
    printed = [process.communicate()[0] for process in running]
    assert not any(process.returncode for process in running)
    return printed


def predicted(recipe: str, link: Link, copies: int) -> dict[str, float]:
    """The command's figures of two processes; means over several commands beside one another."""
    links = ["--bandwidth-gb-s", link.bytes_per_second / 1e9, "--latency-us", link.latency_seconds * 1e6]
    command: list[object] = ["benchmark", "scaling", "--config", recipe, "--trainer.accelerator", "cpu", *links]
    figures = [json.loads(text.splitlines()[-1]) for text in together(*[[*command, "--steps", STEPS]] * copies)]
    return {
        **{way: mean(one[way][1]["efficiency"] for one in figures) for way in ("strong", "weak")},
        **{key: mean(one[key] for one in figures) for key in ("step_seconds", "backward_seconds", "fixed_seconds")},
        "strong_exposed_seconds": mean(one["strong"][1]["exposed_seconds"] for one in figures),
    }


def speed(recipe: str, batch_tokens: int, processes: int, copies: int = 1) -> float:
    """Target tokens a second of `fit` on so many processes; of one of several runs beside one another."""
    command: list[object] = ["fit", "--config", recipe, "--trainer.accelerator", "cpu", "--trainer.max_steps", STEPS]
    command += ["--trainer.devices", processes, "--batches.batch_tokens", batch_tokens, "--run.log_every_steps", EVERY]
    with tempfile.TemporaryDirectory() as folder:
        runs = [Path(folder) / str(copy) for copy in range(copies)]
        together(*([*command, "--run.folder", run] for run in runs))
        # The first interval is warm-up.
        return median(speed for run in runs for _, speed in scalars(run, "train/target_tokens_per_second")[1:])


def main(recipe: str) -> None:
    """Everything in turns, so that drift hits all alike; medians over rounds."""
    settings = load_recipe([Path(recipe)]).batches
    # A batch twice as large for two must not change the groups.
    assert settings.group_tokens is not None
    rounds = []
    for number in range(ROUNDS):
        link = gloo_link()
        alone, beside = predicted(recipe, link, 1), predicted(recipe, link, 2)
        one, one_beside = (speed(recipe, settings.batch_tokens, 1, copies) for copies in (1, 2))
        strong, weak = (
            speed(recipe, batch_tokens, 2) for batch_tokens in (settings.batch_tokens, 2 * settings.batch_tokens)
        )
        rounds.append(
            {
                "gloo_gb_s": link.bytes_per_second / 1e9,
                "gloo_latency_us": link.latency_seconds * 1e6,
                **{f"predicted_{key}": value for key, value in alone.items()},
                "measured_strong": strong / (2 * one),
                "measured_weak": weak / (2 * one),
                **{f"beside_predicted_{key}": value for key, value in beside.items()},
                "beside_measured_strong": strong / (2 * one_beside),
                "beside_measured_weak": weak / (2 * one_beside),
            }
        )
        print(f"round {number + 1}: {json.dumps(rounded(rounds[-1]))}", file=sys.stderr)
    print(json.dumps(rounded({key: median(one[key] for one in rounds) for key in rounds[0]})))


if __name__ == "__main__":
    main(sys.argv[1])
