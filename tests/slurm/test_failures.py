"""Ranks and nodes that die, hang or are lost: the log names them, and the job resumes from its last checkpoint."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline.checkpointing.run_folder import step_path
from tests.conftest import ROOT
from tests.integration.runs import TRAINING, checkpoints, held, step_of
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import SLOWLY, resumed_from, train, wait_until_saved

pytestmark = pytest.mark.slow


@contextmanager
def lost_node(cluster: Cluster, node: str) -> Iterator[None]:
    """Lose a node, and bring it back at the end."""
    cluster.kill_node(node)
    try:
        yield
    finally:
        cluster.start_node(node)
        cluster.make_idle()


def test_a_dead_rank_a_hung_rank(cluster: Cluster, recipe_file: Path, tmp_path: Path) -> None:
    """The same job goes on, on the same nodes; test_preemption.py compares with a run that was never interrupted."""
    run, killed, hung = tmp_path / "run", tmp_path / "killed", tmp_path / "hung"
    options = ["--run.checkpoint_every_steps", 2, "--run.keep_last", 1000]
    options += ["--trainer.max_steps", 20, "--run.timeout_seconds", 40]
    hold = f"{TRAINING} 6 {killed};{TRAINING} 8 {hung}"
    job = train(cluster, recipe_file, run, *options, environment={**SLOWLY, "HOLD": hold})

    wait_until_saved(job, run, step=6)
    [rank] = cluster.tasks(job.number, rank=1)
    os.kill(rank, signal.SIGKILL)
    job.wait_for("starting again on 2 of 2 nodes: 127.0.0.11 127.0.0.12", times=1)
    killed.touch()
    assert "rank 1 on 127.0.0.12 has died or hangs; rank 0 on 127.0.0.11 waited for it" in job.log, job.log
    assert "127.0.0.12: task 1: Killed" in job.log, job.log

    wait_until_saved(job, run, step=6 + 8)
    # Rank 0 holds the store of the others, which does not respond either.
    [rank] = cluster.tasks(job.number, rank=0)
    os.kill(rank, signal.SIGSTOP)
    hung.touch()
    job.wait_for("starting again on 2 of 2 nodes", times=2)
    assert "rank 0 on 127.0.0.11 has died or hangs; rank 1 on 127.0.0.12 waited for it" in job.log, job.log

    assert job.wait() == "COMPLETED", job.log
    assert resumed_from(job) == [6, 6 + 8]
    assert job.restarts == 0
    assert not list(ROOT.glob(f".*-{job.number}"))
    assert step_of(checkpoints(run)[-1]) == 20


def test_a_lost_node(cluster: Cluster, recipe_file: Path, tmp_path: Path) -> None:
    """The job goes on with its other nodes, without waiting for SLURM to give up the lost one.

    tests/integration/test_elastic.py compares a run whose number of ranks changes with one that never stops.
    """
    run, lost = tmp_path / "run", tmp_path / "lost"
    options = ["--run.checkpoint_every_steps", 2, "--run.keep_last", 1000, "--trainer.max_steps", 20]
    environment = {**SLOWLY, "MIN_NODES": "2", **held(6, until=lost)}
    job = train(cluster, recipe_file, run, *options, nodes=3, environment=environment, sbatch=["--gpus=3"])
    wait_until_saved(job, run, step=6)
    with lost_node(cluster, "127.0.0.12"):
        lost.touch()
        job.wait_for("starting again on 2 of 3 nodes: 127.0.0.11 127.0.0.13")
        assert job.wait() == "COMPLETED", job.log
    assert job.restarts == 0
    assert resumed_from(job) == [6]
    assert "rank 1 on 127.0.0.12 has died or hangs" in job.log, job.log
    assert step_of(checkpoints(run)[-1]) == 20


def test_the_first_node_is_lost(cluster: Cluster, recipe_file: Path, tmp_path: Path) -> None:
    """With it the job's script is gone: other nodes have the job requeued once SLURM has given the first one up."""
    run, lost = tmp_path / "run", tmp_path / "lost"
    options = ["--run.checkpoint_every_steps", 2, "--run.keep_last", 1000, "--trainer.max_steps", 20]
    environment = {**SLOWLY, "MIN_NODES": "2", **held(6, until=lost)}
    job = train(cluster, recipe_file, run, *options, nodes=3, environment=environment)
    wait_until_saved(job, run, step=6)
    with lost_node(cluster, "127.0.0.11"):
        lost.touch()
        job.wait_for("the first node 127.0.0.11 is lost; requeueing")
        assert job.wait() == "COMPLETED", job.log
    assert job.restarts == 1
    assert job.hosts() == ["127.0.0.12", "127.0.0.13", "127.0.0.14"]
    assert resumed_from(job) == [6]
    assert step_of(checkpoints(run)[-1]) == 20


def test_a_crash_that_repeats_ends_the_job(cluster: Cluster, recipe_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    environment = {**SLOWLY, "CRASH_AFTER": "6", **held(6, until=step_path(run, 4))}
    job = train(cluster, recipe_file, run, environment=environment)
    assert job.wait() == "FAILED", job.log
    assert job.restarts == 0
    # Once from the beginning, then three times from the checkpoint of step 4.
    assert job.log.count("starting again on 2 of 2 nodes") == 3
    assert job.log.count("[rank1]: step 6: rank 1 on 127.0.0.12 failed\n") == 4
    assert "exit code 1, 3 times before a new checkpoint; not requeued" in job.log.splitlines()[-1]
    # Without the fault, it resumes when it is submitted again.
    mended = train(cluster, recipe_file, run)
    assert mended.wait() == "COMPLETED", mended.log
    assert resumed_from(mended) == [4]
