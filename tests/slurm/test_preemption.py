"""Jobs that are told to give their nodes back at any moment: no step is lost or computed differently."""

import json
import os
import random
import time
from pathlib import Path

import pytest

from pipeline.checkpointing.run_folder import STARTS, SUMMARY
from tests.integration.runs import assert_same_state, checkpoints, held, scalars
from tests.slurm.cluster import Cluster, Job
from tests.slurm.jobs import SLOWLY, resumed_from, saved_after, train

pytestmark = pytest.mark.slow

MOMENTS = [
    ("start", ["USR1"]),
    ("validation", ["USR1"]),
    ("save", ["TERM"]),
    ("training", ["USR1", "TERM", "USR1"]),  # the last two while it is stopping
]


def signal_at(job: Job, moment: str, start: int, pause: float, names: list[str]) -> None:
    """Send signals to all ranks, `pause` seconds after a moment first appears in the log of the given start."""
    job.cluster.wait_until(lambda: job.log.count("MOMENT start") >= 2 * start)
    begin = [index for index in range(len(job.log)) if job.log.startswith("MOMENT start", index)][2 * start - 2]
    job.cluster.wait_until(lambda: f"MOMENT {moment}" in job.log[begin:])
    time.sleep(pause)
    for name in names:
        job.signal(name)


def test_signals_at_any_moment(cluster: Cluster, recipe_file: Path, tmp_path: Path) -> None:
    """One rank is 100 ms late in every step. Each start of the job is signalled at another moment."""
    options = ["--network.dropout", 0.3, "--trainer.val_check_interval", 5, "--run.keep_last", 100]
    options += ["--run.checkpoint_every_steps", 7, "--run.log_every_steps", 1, "--batches.workers", 1]
    options += ["--trainer.max_steps", 70]
    chance, signalled = random.Random(os.getpid()), tmp_path / "signalled"
    environment = {**SLOWLY, **held(14, until=signalled)}  # A start has each moment before.
    job = train(cluster, recipe_file, tmp_path / "run", *options, environment=environment)
    for start, (moment, names) in enumerate(MOMENTS, 1):
        pause = chance.uniform(0, 1.5) if moment == "training" else chance.uniform(0, 0.1)
        signal_at(job, moment, start, pause, names)
        job.wait_for("; requeued", times=start)
    signalled.touch()
    assert job.wait() == "COMPLETED", job.log
    assert job.restarts == len(MOMENTS), job.log
    # It resumes exactly where it was stopped; stopped during start-up, from where that start would have resumed.
    assert resumed_from(job) == saved_after(job), job.log
    # A signal while the corpus is checked ends that at once, with nothing to save: exit code 138.
    assert job.log.count("asked to stop") + job.log.count("exit code 138; requeued") == len(MOMENTS), job.log

    whole = train(cluster, recipe_file, tmp_path / "whole", *options)
    assert whole.wait() == "COMPLETED", whole.log
    assert_same_state(checkpoints(tmp_path / "run")[-1], checkpoints(tmp_path / "whole")[-1])
    for tag in ("train/loss", "validation/loss", "validation/bleu"):
        assert scalars(tmp_path / "run", tag) == scalars(tmp_path / "whole", tag), tag


def test_a_more_urgent_job(cluster: Cluster, recipe_file: Path, tmp_path: Path) -> None:
    options, ended = ["--trainer.max_steps", 20, "--run.checkpoint_every_steps", 1000], tmp_path / "ended"
    job = train(cluster, recipe_file, tmp_path / "run", *options, environment={**SLOWLY, **held(6, until=ended)})
    job.wait_for("MOMENT training")
    urgent = cluster.submit("--partition=urgent", "--nodes=3", "--exclusive", "--wrap", "true")
    assert urgent.wait() == "COMPLETED"
    ended.touch()
    assert job.wait() == "COMPLETED", job.log
    assert job.restarts == 1
    [step] = saved_after(job)
    assert resumed_from(job) == [step]
    first, second = (json.loads(line) for line in (tmp_path / "run" / STARTS).read_text().splitlines())
    assert [(start["step"], start["restarts"]) for start in (first, second)] == [(0, 0), (step, 1)]
    assert first["job"] == second["job"] == str(job.number)
    # Goodput counts from the submission, including the wait for nodes and the start of processes.
    summary = json.loads((tmp_path / "run" / SUMMARY).read_text())
    assert first["submitted"] % 1 == 0  # by SLURM's clock
    assert first["submitted"] < first["began"]
    assert summary["seconds_since_submission"] > second["began"] - first["submitted"]
    assert 0 < summary["goodput"] < 1


def test_cancelled_by_its_owner(cluster: Cluster, recipe_file: Path, tmp_path: Path) -> None:
    """It saves and is not requeued, also if it is cancelled again while it saves.

    Submitted again it resumes.
    """
    options = ["--trainer.max_steps", 20, "--run.checkpoint_every_steps", 1000]
    environment = {**SLOWLY, "SAVE_SECONDS": "4", **held(6)}
    job = train(cluster, recipe_file, tmp_path / "run", *options, environment=environment)
    job.wait_for("MOMENT training", times=3)
    cluster.run("scancel", job.number)
    job.wait_for("MOMENT save")
    cluster.run("scancel", job.number, check=False)
    assert job.wait() == "CANCELLED"
    cluster.wait_until(cluster.is_idle)
    [step] = saved_after(job)
    again = train(cluster, recipe_file, tmp_path / "run", *options)
    assert again.wait() == "COMPLETED", again.log
    assert resumed_from(again) == [step]
    assert job.state == "CANCELLED"
