"""Checks that need several ranks, on two processes; tests/slurm/test_doctor.py runs them on a cluster."""

import json
import multiprocessing
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from data_module.errors import InputError
from pipeline.commands.doctor import agree_on_context
from pipeline.config.recipe import load_recipe
from pipeline.runtime.devices import gpus_mistake
from pipeline.runtime.launch import JobStep
from pipeline.training import rank_checks
from pipeline.training.checks import CheckContext, CheckResult, check_ignored_keys, check_trainer
from pipeline.training.rank_checks import RankGroup, check_ranks
from tests.conftest import ROOT

FORK = multiprocessing.get_context("fork")
STEP = JobStep(job="7", rank=0, local_rank=0, num_tasks=2, num_nodes=2, tasks_per_node=1, restarts=0)

RANK = """
import time
from datetime import timedelta
import torch.distributed as dist
from pipeline.training.rank_checks import RankGroup, _check_all_reduce
from pipeline.runtime.launch import JobStep

ranks = RankGroup(JobStep(job="7", rank=0, local_rank=0, num_tasks=1, num_nodes=1, tasks_per_node=1, restarts=0))
ranks.store = dist.TCPStore("127.0.0.1", 0, is_master=True)
"""
EXIT = "ranks.exit_after(timedelta(seconds=3))"


def said(*lines: str) -> str:
    """Return the output of a rank that runs these lines and then waits."""
    code = RANK + "\n".join([*lines, "time.sleep(60)"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    return done.stdout


def test_a_collective_that_hangs_is_reported() -> None:
    """A sleep replaces NCCL, which needs GPUs and, unlike gloo, has no timeout of its own here."""
    hanging = said("dist.all_reduce = lambda _: time.sleep(60)", EXIT, "list(_check_all_reduce(ranks))")
    assert hanging.startswith("WRONG all-reduce over gloo does not finish; export GLOO_SOCKET_IFNAME=")
    assert "rank 0]" in hanging
    # Outside a collective, rank 0 is the one that does not respond.
    assert said("list(_check_all_reduce(ranks))", EXIT).startswith("WRONG ranks 0 do not respond")
    assert said(EXIT).startswith("WRONG ranks 0 do not respond")


def rank(number: int, folder: Path, options: list[str], fault: Callable[[], None]) -> None:
    """Run a rank in this forked process and write its results to a file."""
    ranks = RankGroup(JobStep(**{**vars(STEP), "rank": number}))
    ranks.location = f"rank {number}"
    ranks.store, ranks.first_node_is_local = dist.FileStore(str(folder / "store"), 2), True
    fault()
    results = list(check_ranks(ranks, load_recipe([ROOT / "configs" / "demo.yaml"], options)))
    (folder / f"rank-{number}").write_text(json.dumps(results))
    ranks.all_gather(None)
    os._exit(0)


def found(
    folder: Path, corpora: list[Path], runs: list[Path], faults: list[Callable[[], None]]
) -> list[list[tuple[bool, str, str | None]]]:
    """Return the results of two ranks, each with its own corpus, run folder and fault."""
    ranks = []
    for number in (0, 1):
        options = [f"--corpus.folder={corpora[number]}", f"--run.folder={runs[number]}"]
        ranks.append(FORK.Process(target=rank, args=(number, folder, options, faults[number])))
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0, 0]
    return [[(*one[:3],) for one in json.loads((folder / f"rank-{number}").read_text())] for number in (0, 1)]


def nothing() -> None:
    """No fault."""


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_two_ranks_find_nothing_wrong(tiny_corpus: Path, tmp_path: Path) -> None:
    first, second = found(tmp_path, [tiny_corpus] * 2, [tmp_path / "run"] * 2, [nothing] * 2)
    assert second == []
    [(ok, message, _)] = first
    assert ok
    assert re.match(r"all-reduce over gloo, 2 ranks: [\d,]+ MB/s$", message)
    assert not list(tmp_path.glob(".doctor*"))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_what_differs_between_two_ranks(tmp_path: Path) -> None:
    """The clock, a package, a byte of the corpus and the run folder; the rank with the fault reports it."""

    def fault() -> None:
        now, version = time.time, rank_checks.version
        time.time = lambda: now() + 60
        rank_checks.version = lambda name: "0.1" if name == "numpy" else version(name)

    corpora, run = [tmp_path / "ours", tmp_path / "theirs"], tmp_path / "elsewhere" / "run"
    for corpus, last in zip(corpora, (b"a", b"b"), strict=True):
        corpus.mkdir()
        (corpus / "manifest.json").touch()
        (corpus / "tokens").write_bytes(bytes(4 << 20) + last)  # larger than the parts that are read
    run.mkdir(parents=True)
    first, second = found(tmp_path, corpora, [tmp_path / "run", run], [nothing, fault])
    [not_shared] = [message for ok, message, _ in first if not ok]
    assert re.match(r"run folder .* is not shared with ranks 1; ", not_shared)
    messages = [message for _, message, _ in second]
    assert [where for _, _, where in second] == ["rank 1"] * 4
    for message, expected in zip(
        messages,
        (
            r"the clock is \+(59|6\d)\.\d s from rank 0's; ",
            r"numpy 0\.1 here and \d\S* on rank 0; ",
            rf"corpus {corpora[1]} differs ",
            r"run folder .* is not shared with ranks 0; ",
        ),
        strict=True,
    ):
        assert re.match(expected, message), message


def test_tasks_and_gpus_of_a_node() -> None:
    step = JobStep(**{**vars(STEP), "num_tasks": 8, "tasks_per_node": 4})
    for visible, allocated in ((4, "4"), (0, None), (4, "gpu:4")):
        assert gpus_mistake(step, visible, allocated) is None
    fewer, more, lost = (gpus_mistake(step, *numbers) or "" for numbers in ((0, "4"), (8, "8"), (3, "4")))
    assert fewer.startswith("SLURM allocated 4 GPUs on this node and torch sees 0")
    assert more == "the node has 8 GPUs for 4 tasks; request 4 GPUs per node, or set --ntasks-per-node=8"
    assert lost.endswith("torch sees 3; check nvidia-smi and torch's CUDA build")


@pytest.mark.parametrize(("tasks", "visible", "allocated"), [(8, 1, "8"), (4, 2, "8"), (8, 1, None)])
def test_tasks_that_see_a_part_of_their_nodes_gpus(
    tasks: int, visible: int, allocated: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with --gpus-per-task=1, where each of eight tasks sees one GPU of eight. `fit` says the same."""
    step = JobStep(**{**vars(STEP), "num_tasks": tasks, "num_nodes": 1, "tasks_per_node": tasks})
    bound = gpus_mistake(step, visible, allocated) or ""
    assert "; request GPUs by --gpus-per-node, not by --gpus-per-task or --gpu-bind" in bound
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", allocated or "")
    with pytest.raises(InputError) as refusal:
        check_trainer(replace(demo_context([]), job=step))
    assert str(refusal.value) == bound


def demo_context(options: list[str]) -> CheckContext:
    return CheckContext(load_recipe([ROOT / "configs" / "demo.yaml"], options), STEP, reset=False, init_from=None)


def test_nodes_and_devices_of_a_recipe_are_ignored() -> None:
    assert list(check_ignored_keys(demo_context(["--trainer.devices=1", "--trainer.num_nodes=2"]))) == []
    [ignored] = check_ignored_keys(demo_context(["--trainer.num_nodes=3"]))
    assert ignored == CheckResult(True, "trainer.num_nodes 3 is ignored: the job sets it to 2")


@pytest.mark.parametrize("fails_on", [{1}, {0, 1}, set()])
def test_a_recipe_that_a_rank_cannot_load_is_checked_by_none(tmp_path: Path, fails_on: set[int]) -> None:
    """Otherwise the ranks would wait for one another in different checks."""
    ranks = [RankGroup(JobStep(**{**vars(STEP), "rank": number})) for number in (0, 1)]
    results: dict[int, tuple[CheckContext | None, list[CheckResult]]] = {}

    def agree(number: int) -> None:
        ranks[number].location = f"rank {number}"
        ranks[number].store = dist.FileStore(str(tmp_path / "store"), 2)
        failed = number in fails_on
        loaded = CheckResult(False, "no such file") if failed else CheckResult(True, "recipe demo")
        results[number] = agree_on_context(ranks[number], None if failed else demo_context([]), loaded)

    threads = [threading.Thread(target=agree, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[number][0] is not None for number in (0, 1)] == [not fails_on] * 2
    first = (False, "no such file", "") if 0 in fails_on else (True, "recipe demo", "")
    second = [(False, "no such file", "rank 1")] if fails_on == {1} else []
    assert [[one[:3] for one in results[number][1]] for number in (0, 1)] == [[first], second]
