"""Checks that need several ranks, on two processes; tests/slurm/test_doctor.py runs them on a cluster."""

import json
import multiprocessing
import os
import re
import shutil
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from data_module.errors import InputError
from pipeline.config.recipe import Recipe, load_recipe
from pipeline.doctor import doctor, rank_checks
from pipeline.doctor.rank_checks import RankGroup, UnresponsiveRanksError, check_ranks
from pipeline.doctor.recipe_checks import CheckResult, Report
from pipeline.doctor.start_checks import check_machine, check_trainer
from pipeline.ranks.rendezvous import other_settings
from pipeline.runtime.devices import gpus_mistake, processors_note
from pipeline.runtime.launch import RANKS_MISSING, JobStep, node_name
from pipeline.training.trainer import make_trainer, trainer_options
from tests.conftest import ROOT, program

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

FORK = multiprocessing.get_context("fork")
STEP = JobStep(job="7", rank=0, local_rank=0, num_tasks=2, num_nodes=2, tasks_per_node=1, restarts=0)

RANK = """
import time
from datetime import timedelta
import torch.distributed as dist
from pipeline.doctor.rank_checks import RankGroup, _check_all_reduce
from pipeline.runtime.launch import JobStep

ranks = RankGroup(JobStep(job="7", rank=0, local_rank=0, num_tasks=1, num_nodes=1, tasks_per_node=1, restarts=0))
ranks.store = dist.TCPStore("127.0.0.1", 0, is_master=True)
"""
EXIT = "ranks.exit_after(timedelta(seconds=0.1))"


def said(*lines: str, exit_code: int = RANKS_MISSING) -> str:
    """Return the output of a rank that runs these lines and then waits."""
    done = program(RANK + "\n".join([*lines, "time.sleep(60)"]))
    assert done.returncode == exit_code, done.stderr.decode()
    return done.stdout.decode()


def test_a_collective_that_hangs_is_reported() -> None:
    """A sleep replaces NCCL, which needs GPUs and, unlike gloo, has no timeout of its own here."""
    hang = f"dist.all_reduce = lambda _: {EXIT} or time.sleep(60)"
    hanging = said(hang, "list(_check_all_reduce(ranks))", exit_code=1)
    assert hanging.startswith("WRONG all-reduce over gloo does not finish; export GLOO_SOCKET_IFNAME=")
    assert "rank 0]" in hanging
    # Outside a collective, rank 0 is the one that does not respond.
    assert said("list(_check_all_reduce(ranks))", EXIT).startswith("WRONG ranks 0 do not respond")


def demo_recipe(*options: str) -> Recipe:
    return load_recipe([ROOT / "configs" / "demo.yaml"], options)


def rank(number: int, folder: Path, options: list[str], fault: Callable[[], None]) -> None:
    """Run a rank in this forked process and write its results to a file."""
    ranks = RankGroup(replace(STEP, rank=number))
    ranks.location = f"rank {number}"
    ranks.store, ranks.first_node_is_local = dist.FileStore(str(folder / "store"), 2), True
    fault()
    results = list(check_ranks(ranks, demo_recipe(*options)))
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


def test_two_ranks_find_nothing_wrong(tiny_corpus: Path, tmp_path: Path) -> None:
    """Each rank has its own copy of the corpus; version 1.0.0 noted runs in rank 0's."""
    corpora = [Path(shutil.copytree(tiny_corpus, tmp_path / name)) for name in ("ours", "theirs")]
    (corpora[0] / ".runs").write_text("another\n")
    first, second = found(tmp_path, corpora, [tmp_path / "run"] * 2, [nothing] * 2)
    assert second == []
    [(ok, message, _)] = first
    assert ok
    assert re.match(r"all-reduce over gloo, 2 ranks: [\d,]+ MB/s$", message)
    assert not list(tmp_path.glob(".doctor*"))


@pytest.mark.parametrize("is_truncated", [True, False])
def test_what_differs_between_two_ranks(tiny_corpus: Path, tmp_path: Path, is_truncated: bool) -> None:
    """The corpus, which is another one or truncated, and the run folder; the rank with the fault reports it."""
    corpora = [Path(shutil.copytree(tiny_corpus, tmp_path / name)) for name in ("ours", "theirs")]
    run = tmp_path / "elsewhere" / "run"
    if is_truncated:
        os.truncate(corpora[1] / "train.target.tokens.npy", 200)
    else:
        text = (corpora[1] / "manifest.json").read_text()
        (corpora[1] / "manifest.json").write_text(text + "\n")
    run.mkdir(parents=True)
    first, second = found(tmp_path, corpora, [tmp_path / "run", run], [nothing] * 2)
    [not_shared] = [message for ok, message, _ in first if not ok]
    assert re.match(r"run folder .* is not shared with ranks 1; ", not_shared)
    messages = [message for _, message, _ in second]
    assert [where for _, _, where in second] == ["rank 1"] * 2
    for message, expected in zip(
        messages, (rf"corpus {corpora[1]} differs ", r"run folder .* is not shared with ranks 0; "), strict=True
    ):
        assert re.match(expected, message), message


FITS = [(8, 8, "8"), (8, 1, "8"), (2, 0, ""), (2, 0, "0"), (1, 1, "")]
"""Tasks of a node, the GPUs that each sees, and those that SLURM allocated: all of them, or one for each task."""
DIFFERS = [(4, 1, "1"), (4, 0, "4"), (4, 3, "4"), (4, 8, "8"), (4, 2, "8"), (1, 2, "")]


@pytest.mark.parametrize(("tasks", "visible", "allocated"), FITS + DIFFERS)
def test_tasks_and_gpus_of_a_node(tasks: int, visible: int, allocated: str) -> None:
    step = replace(STEP, num_tasks=2 * tasks, tasks_per_node=tasks)
    mistake = gpus_mistake(step, visible, {"SLURM_GPUS_ON_NODE": allocated} if allocated else {})
    line = f"torch sees {visible} of the {allocated or visible} GPUs of this node, which has {tasks} tasks; ask for "
    assert mistake is None if (tasks, visible, allocated) in FITS else str(mistake).startswith(line)
    if visible == 1:  # SLURM may count a task's own GPUs only.
        assert gpus_mistake(step, 1, {"SLURM_GPUS_ON_NODE": "1", "SLURM_GPUS_PER_TASK": "1"}) is None


def test_two_ranks_with_the_same_gpu(tiny_corpus: Path, tmp_path: Path) -> None:
    """NCCL, which would refuse it in other words, is not asked."""

    def fault() -> None:
        torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
        torch.cuda.get_device_properties = lambda _: SimpleNamespace(name="H100", uuid="GPU-3")

    first, second = found(tmp_path, [tiny_corpus] * 2, [tmp_path / "run"] * 2, [fault] * 2)
    [(ok, message, _)] = first
    assert not ok
    assert message.startswith(f"ranks 0, 1 on {node_name()} have the same GPU; ")
    assert second == first  # `doctor` prints it once


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Torch sees one of a node's four GPUs, as with --gpus-per-task=1."""
    for name, value in {"SLURM_GPUS_ON_NODE": "4", "SLURM_GPUS_PER_TASK": "1", "CUDA_VISIBLE_DEVICES": "3"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "This GPU")
    properties = SimpleNamespace(name="H100", total_memory=0, uuid="GPU-3", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    return monkeypatch


@pytest.mark.parametrize("local_rank", [0, 3])
def test_a_task_that_sees_one_gpu_trains_on_it(local_rank: int, one_gpu: pytest.MonkeyPatch) -> None:
    """`doctor` and `fit` accept it, and Lightning has as many ranks as tasks, each on the device 0 that it sees."""
    step = JobStep("7", rank=local_rank, local_rank=local_rank, num_tasks=4, num_nodes=1, tasks_per_node=4, restarts=0)
    results = list(check_machine(step))
    assert [result.message for result in results if not result.ok and "torch" not in result.message] == []
    one_gpu.setattr("pipeline.runtime.backend_choice.missing_compiler", lambda: "has no compiler")
    check_trainer(demo_recipe(), step, Report())

    options = trainer_options({"max_steps": 1}, step, 60)
    trainer = make_trainer(options, step, logger=False)
    assert trainer.strategy.root_device == torch.device("cuda", 0)
    assert (trainer.num_devices, trainer.world_size, trainer.local_rank) == (4, 4, local_rank)
    assert trainer.strategy.determine_ddp_device_ids() == [0]
    assert rank_checks.own_gpu(step) == 0  # of doctor's all-reduce


@pytest.mark.two_processors
def test_doctor_notes_processors_that_a_task_may_not_use() -> None:
    """A binding of another job, or taskset."""
    usable, count = os.sched_getaffinity(0), os.cpu_count()
    step = JobStep("7", rank=0, local_rank=0, num_tasks=1, num_nodes=1, tasks_per_node=1, restarts=0)
    two_tasks = replace(step, num_tasks=2, tasks_per_node=2)
    given = {"SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "2"}
    whole = processors_note(step, given)
    try:
        os.sched_setaffinity(0, {min(usable)})
        [line] = [one.message for one in check_machine() if "CPU cores" in one.message]
        asked = processors_note(two_tasks, {**given, "SLURM_CPUS_PER_TASK": "4"})
        notes = [processors_note(step, given), processors_note(two_tasks, given), processors_note(None, {})]
    finally:
        os.sched_setaffinity(0, usable)
    assert f"1 usable of {count} CPU cores" in line
    assert whole is None
    assert str(asked).startswith("this task may use 1 of the 4 processors that SLURM gave it (SLURM_CPUS_PER_TASK 4)")
    assert [note and note.partition(" processors")[0] for note in notes] == ["this task may use 1 of the 2", None, None]


def test_each_rank_reports_its_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its errors; what is in order, the first one reports."""
    machine = [CheckResult(True, "fine"), CheckResult(True, "slow", is_warning=True), CheckResult(False, "wrong")]
    monkeypatch.setattr(doctor, "check_machine", lambda _: machine)
    monkeypatch.setattr(doctor, "check_ranks", lambda *_: [])
    found = []
    for rank in (0, 1):
        job = SimpleNamespace(rank=rank)
        ranks = SimpleNamespace(job=job, location=f"rank {rank}", all_gather=lambda value: [value])
        loaded = CheckResult(False, "no such recipe")
        results = doctor._results_of(ranks, None, loaded, Namespace())
        found.append([one.message for one in results])
    assert found == [["fine", "slow", "wrong", "no such recipe"], ["slow", "wrong"]]


def test_ranks_on_processors_of_several_kinds_cannot_share_muons_updates(one_gpu: pytest.MonkeyPatch) -> None:
    def shared(name: str, optimizer: str, *options: str) -> dict[str, object]:
        one_gpu.setattr(torch.cuda, "get_device_name", lambda _: name)
        recipe = demo_recipe("--training.optimizer", optimizer, *options)
        return doctor._shared_settings(recipe, CheckResult(True, ""), STEP)

    assert other_settings(shared("A100", "adam"), shared("H100", "adam")) == ""
    assert other_settings(shared("H100", "muon"), shared("H100", "muon")) == ""
    assert other_settings(shared("A100", "muon"), shared("H100", "muon")) == (
        "training.optimizer muon on A100, not H100"
    )
    on_cpu = "--trainer.accelerator=cpu"
    assert other_settings(shared("A100", "muon", on_cpu), shared("H100", "muon", on_cpu)) == ""


def test_a_part_of_a_nodes_gpus_is_refused_by_fit(one_gpu: pytest.MonkeyPatch) -> None:
    """In the line that doctor prints, not by Lightning."""
    step = replace(STEP, num_tasks=8, num_nodes=1, tasks_per_node=8)
    one_gpu.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InputError, match=r"^torch sees 2 of the 4 GPUs of this node, which has 8 tasks; ask for a GPU"):
        check_trainer(demo_recipe(), step, Report())


def test_what_ranks_have_in_common() -> None:
    """Ranks with other packages, another recipe or none do not begin; folders are compared later."""

    def shared(*options: str) -> dict[str, object]:
        return doctor._shared_settings(demo_recipe(*options), CheckResult(True, "recipe demo"), STEP)

    ours = shared("--run.folder=ours")
    assert other_settings(shared("--run.folder=theirs"), ours) == ""
    theirs = shared("--training.warmup_steps=7")
    assert other_settings(theirs, ours) == f"training.warmup_steps 7, not {demo_recipe().training.warmup_steps}"
    assert other_settings({**ours, "numpy": "0.1"}, ours) == f"numpy 0.1, not {version('numpy')}"
    failed = doctor._shared_settings(None, CheckResult(False, "no such file"), STEP)
    assert other_settings(failed, failed) == ""
    assert other_settings(failed, ours).startswith("recipe no such file, not recipe demo; ")


@pytest.mark.parametrize("call", [lambda ranks: ranks.all_gather(1), RankGroup.leave])
def test_rank_0_ends_before_the_others(call: Callable[[RankGroup], object]) -> None:
    """It holds the store; the others say so in one line."""
    ranks = RankGroup(replace(STEP, rank=1))
    held = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks.store = dist.TCPStore("127.0.0.1", held.port, is_master=False)
    del held
    with pytest.raises(UnresponsiveRanksError, match=r"^ranks 0 do not respond: "):
        call(ranks)
