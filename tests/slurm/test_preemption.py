"""Jobs that are told to give their nodes back, at any moment: not a step is lost, nor done otherwise."""

import json
import os
import random
from pathlib import Path

import pytest

from pipeline.monitoring import STARTS, SUMMARY
from tests.integration.runs import assert_same_state, checkpoints, scalars
from tests.slurm.cluster import Cluster, Job
from tests.slurm.jobs import SLOWLY, resumed_from, saved_after, train

pytestmark = pytest.mark.slow

MOMENTS = ["start", "validation", "save", "training"]
RANDOM_MOMENTS = int(os.environ.get("RANDOM_MOMENTS", "0"))
"""More of them take half a minute each."""


def signal_at(job: Job, moment: str, start: int, pause: float) -> None:
    """SIGUSR1 to all ranks so long after a moment of its start of that number is first seen."""
    job.cluster.wait_until(lambda: job.log.count("MOMENT start") >= 2 * start, 60)
    begin = [index for index in range(len(job.log)) if job.log.startswith("MOMENT start", index)][2 * start - 2]
    job.cluster.wait_until(lambda: f"MOMENT {moment}" in job.log[begin:], 60)
    job.cluster.sleep(pause)
    job.signal("USR1")


def test_signals_at_any_moment(cluster: Cluster, recipe_file: Path, tmp_path: Path) -> None:
    """One rank is 100 ms late at every step. Each start of the job is signalled in its own moment."""
    options = ["--network.dropout", 0.3, "--trainer.val_check_interval", 5, "--run.keep_last", 100]
    options += ["--run.checkpoint_every_steps", 7, "--run.log_every_steps", 1, "--batches.workers", 1]
    options += ["--trainer.max_steps", 40 + 25 * RANDOM_MOMENTS]
    chance = random.Random(os.getpid())
    moments = MOMENTS + ["training"] * RANDOM_MOMENTS
    job = train(cluster, recipe_file, tmp_path / "run", *options, environment=SLOWLY)
    for start, moment in enumerate(moments, 1):
        pause = chance.uniform(0, 1.5) if moment == "training" else chance.uniform(0, 0.1)
        signal_at(job, moment, start, pause)
        job.wait_for("; requeued", times=start)
    assert job.wait(180) == "COMPLETED", job.log
    assert job.restarts == len(moments)
    # It goes on exactly where it was stopped; stopped during start-up, from where that start would have.
    assert resumed_from(job) == saved_after(job)
    assert job.log.count("asked to stop") == len(moments)

    whole = train(cluster, recipe_file, tmp_path / "whole", *options)
    assert whole.wait(180) == "COMPLETED", whole.log
    assert_same_state(checkpoints(tmp_path / "run")[-1], checkpoints(tmp_path / "whole")[-1])
    for tag in ("train/loss", "validation/loss", "validation/bleu"):
        assert scalars(tmp_path / "run", tag) == scalars(tmp_path / "whole", tag), tag


def test_a_more_urgent_job(cluster: Cluster, recipe_file: Path, tmp_path: Path) -> None:
    options = ["--trainer.max_steps", 60, "--run.checkpoint_every_steps", 1000]
    job = train(cluster, recipe_file, tmp_path / "run", *options, environment=SLOWLY)
    job.wait_for("MOMENT training")
    urgent = cluster.submit("--partition=urgent", "--nodes=3", "--exclusive", "--wrap", "true")
    assert urgent.wait() == "COMPLETED"
    assert job.wait() == "COMPLETED", job.log
    assert job.restarts == 1
    [step] = saved_after(job)
    assert resumed_from(job) == [step]
    first, second = (json.loads(line) for line in (tmp_path / "run" / STARTS).read_text().splitlines())
    assert [(start["step"], start["restarts"]) for start in (first, second)] == [(0, 0), (step, 1)]
    assert first["job"] == second["job"] == str(job.number)
    # Goodput counts from here on, the wait for nodes and the start of processes included.
    summary = json.loads((tmp_path / "run" / SUMMARY).read_text())
    assert first["submitted"] < first["began"] - 1
    assert summary["seconds_since_submission"] > second["began"] - first["submitted"]
    assert 0 < summary["goodput"] < 1


def test_time_is_up(cluster: Cluster, recipe_file: Path, tmp_path: Path) -> None:
    """Without any warning before: SIGTERM at the limit, and KillWait until the end."""
    options = ["--trainer.max_steps", 2000, "--run.checkpoint_every_steps", 5000]
    limit = ["--time=1", "--signal=USR1@0"]
    job = train(cluster, recipe_file, tmp_path / "run", *options, sbatch=limit, environment=SLOWLY)
    job.wait_for("; requeued", 200)
    [step] = saved_after(job)
    assert step > 0
    job.wait_for("resuming from")
    assert resumed_from(job) == [step]


def test_cancelled_by_its_owner(cluster: Cluster, recipe_file: Path, tmp_path: Path) -> None:
    """It saves, and is not put back into the queue; submitted again it goes on, and once finished it says so."""
    options = ["--trainer.max_steps", 40, "--run.checkpoint_every_steps", 1000]
    job = train(cluster, recipe_file, tmp_path / "run", *options, environment=SLOWLY)
    job.wait_for("MOMENT training", times=3)
    cluster.run("scancel", job.number)
    assert job.wait() == "CANCELLED"
    cluster.wait_until(cluster.is_idle, 30)
    [step] = saved_after(job)
    again = train(cluster, recipe_file, tmp_path / "run", *options)
    assert again.wait() == "COMPLETED", again.log
    assert resumed_from(again) == [step]
    finished = train(cluster, recipe_file, tmp_path / "run", *options)
    assert finished.wait() == "COMPLETED"
    assert finished.log.count("finished at step 40; raise trainer.max_steps to go on") == 1
    assert job.state == "CANCELLED"
