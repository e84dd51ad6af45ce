"""What a rank says when what it waits for never comes; tests/slurm/test_doctor.py has the rest, on a cluster."""

import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from pipeline.config.recipe import load_recipe
from pipeline.preflight import distributed as doctor_ranks
from pipeline.preflight.distributed import RankGroup, check, gpus, hardware_keys
from pipeline.runtime.slurm import JobStep
from tests.conftest import ROOT

FORK = multiprocessing.get_context("fork")
STEP = JobStep(job="7", rank=0, local_rank=0, num_tasks=2, num_nodes=2, tasks_per_node=1, restarts=0)

RANK = """
import time
from datetime import timedelta
import torch.distributed as dist
from pipeline.preflight.distributed import RankGroup, _all_reduce
from pipeline.runtime.slurm import JobStep

ranks = RankGroup(JobStep(job="7", rank=0, local_rank=0, num_tasks=1, num_nodes=1, tasks_per_node=1, restarts=0))
ranks.store = dist.TCPStore("127.0.0.1", 0, is_master=True)
"""
GIVE_UP = "ranks.give_up_after(timedelta(seconds=3))"


def said(*lines: str) -> str:
    """By a rank that does this and then waits."""
    code = RANK + "\n".join([*lines, "time.sleep(60)"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    return done.stdout


def test_a_collective_that_does_not_end_is_named() -> None:
    """NCCL waits for ever where gloo gives up; a sleep stands for it here, where no GPU is."""
    hanging = said("dist.all_reduce = lambda _: time.sleep(60)", GIVE_UP, "list(_all_reduce(ranks))")
    assert hanging.startswith("WRONG all-reduce over gloo does not end; export GLOO_SOCKET_IFNAME=")
    assert "rank 0]" in hanging
    # Where it has ended, rank 0 is waited for.
    assert said("list(_all_reduce(ranks))", GIVE_UP).startswith("WRONG ranks 0 have stopped answering")
    assert said(GIVE_UP).startswith("WRONG ranks 0 have stopped answering")


def rank(number: int, folder: Path, options: list[str], fault: Callable[[], None]) -> None:
    """In a process of its own: leaves what it has found."""
    ranks = RankGroup(JobStep(**{**vars(STEP), "rank": number}))
    ranks.here = f"rank {number}"
    ranks.store, ranks.first_is_local = dist.FileStore(str(folder / "store"), 2), True
    fault()
    findings = list(check(ranks, load_recipe([ROOT / "configs" / "demo.yaml"], options)))
    (folder / f"rank-{number}").write_text(json.dumps([[one.well, one.what, one.where] for one in findings]))
    ranks.exchange(None)
    os._exit(0)


def found(
    folder: Path, corpora: list[Path], runs: list[Path], faults: list[Callable[[], None]]
) -> list[list[tuple[bool, str, str | None]]]:
    """What each of two ranks finds, given its corpus, its run folder and what is wrong with it."""
    ranks = []
    for number in (0, 1):
        options = [f"--corpus.folder={corpora[number]}", f"--run.folder={runs[number]}", "--trainer.devices=3"]
        ranks.append(FORK.Process(target=rank, args=(number, folder, options, faults[number])))
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0, 0]
    return [[(*one,) for one in json.loads((folder / f"rank-{number}").read_text())] for number in (0, 1)]


def nothing() -> None:
    """No fault."""


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_two_ranks_find_nothing_wrong(tiny_corpus: Path, tmp_path: Path) -> None:
    first, second = found(tmp_path, [tiny_corpus] * 2, [tmp_path / "run"] * 2, [nothing] * 2)
    assert second == []
    assert all(well for well, _, _ in first)
    assert first[0][1] == "trainer.devices 3 of the recipe does not count: the job gives 1"
    assert re.match(r"all-reduce over gloo, 2 ranks: [\d,]+ MB/s$", first[-1][1])
    assert not list(tmp_path.glob(".doctor*"))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_what_differs_between_two_ranks(tmp_path: Path) -> None:
    """The clock, a package, a byte of the corpus and the run folder; each is told by the rank that has it."""

    def fault() -> None:
        now, version = time.time, doctor_ranks.version
        time.time = lambda: now() + 60
        doctor_ranks.version = lambda name: "0.1" if name == "numpy" else version(name)

    corpora, run = [tmp_path / "ours", tmp_path / "theirs"], tmp_path / "elsewhere" / "run"
    for corpus, last in zip(corpora, (b"a", b"b"), strict=True):
        corpus.mkdir()
        (corpus / "manifest.json").touch()
        (corpus / "tokens").write_bytes(bytes(4 << 20) + last)  # larger than the parts that are read
    run.mkdir(parents=True)
    first, second = found(tmp_path, corpora, [tmp_path / "run", run], [nothing, fault])
    [away] = [what for well, what, _ in first if not well]
    assert re.match(r"run folder .* is not the one of ranks 1; ", away)
    said = [what for _, what, _ in second]
    assert [where for _, _, where in second] == ["rank 1"] * 4
    for what, expected in zip(
        said,
        (
            r"the clock is \+(59|6\d)\.\d s from rank 0's; ",
            r"numpy 0\.1, and \d\S* on rank 0; ",
            rf"corpus {corpora[1]} differs ",
            r"run folder .* is not the one of ranks 0; ",
        ),
        strict=True,
    ):
        assert re.match(expected, what), what


def test_tasks_and_gpus_of_a_node() -> None:
    step = JobStep(**{**vars(STEP), "num_tasks": 8, "tasks_per_node": 4})
    assert list(gpus(step, 4, "4")) == list(gpus(step, 0, None)) == list(gpus(step, 4, "gpu:4")) == []
    [fewer] = gpus(step, 0, "4")
    assert fewer.what.startswith("SLURM gave this node 4 GPUs and torch sees 0")
    [more] = gpus(step, 8, "8")
    assert more.what.startswith("8 GPUs are seen by 4 tasks of the node; give --ntasks-per-node=8")
    assert not fewer.well
    assert not more.well


def test_what_a_recipe_says_of_nodes_and_devices() -> None:
    for options, count in ((["--trainer.devices=1", "--trainer.num_nodes=2"], 0), (["--trainer.num_nodes=3"], 1)):
        assert len(list(hardware_keys(STEP, load_recipe([ROOT / "configs" / "demo.yaml"], options)))) == count
