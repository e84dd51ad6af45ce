"""Nodes in separate networks, and a link between them that is cut."""

import socket
from pathlib import Path

import pytest

from tests.integration.runs import checkpoints, held, step_of
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import SLOWLY, resumed_from, train, wait_until_saved
from tests.slurm.links import Links

pytestmark = pytest.mark.slow


def test_names_that_lead_to_themselves(cluster_apart: Cluster, recipe_file: Path, tmp_path: Path) -> None:
    """doctor reports them before any rank waits for another; with the interface named, training works."""
    job = train(cluster_apart, recipe_file, tmp_path / "run")
    assert job.wait() == "FAILED", job.log
    first, second, _ = cluster_apart.nodes
    assert (
        f"this node's name {socket.gethostname()} resolves to the node itself, so gloo on other nodes cannot reach it; "
        "export GLOO_SOCKET_IFNAME=the interface between nodes (lo, eth0) "
        f"[{first} rank 0; {second} rank 1]"
    ) in job.log
    mended = train(cluster_apart, recipe_file, tmp_path / "run", environment={"GLOO_SOCKET_IFNAME": "eth0"})
    assert mended.wait() == "COMPLETED", mended.log
    assert "all-reduce over gloo, 2 ranks" in mended.log


def test_a_cut_link(cluster_apart: Cluster, links: Links, recipe_file: Path, tmp_path: Path) -> None:
    """No connection is closed, so all ranks wait until their timeouts.

    Without MIN_NODES all nodes of the job are needed, so it is requeued, and resumes on another node.
    """
    run, cut = tmp_path / "run", tmp_path / "cut"
    options = ["--run.checkpoint_every_steps", 2, "--trainer.max_steps", 20, "--run.timeout_seconds", 40]
    environment = {**SLOWLY, "GLOO_SOCKET_IFNAME": "eth0", **held(6, until=cut)}
    job = train(cluster_apart, recipe_file, run, *options, environment=environment)
    wait_until_saved(job, run, step=6)
    first, lost, _ = cluster_apart.nodes
    links.cut(lost)
    cut.touch()
    try:
        job.wait_for(f"rank 1 on {lost} has died or hangs; rank 0 on {first} waited for it")
        job.wait_for(f"1 of 2 nodes answer ({first}); 2 are needed, the first one among them")
        assert job.wait() == "COMPLETED", job.log
        assert job.restarts == 1
        assert lost not in job.hosts()
        assert resumed_from(job) == [6]
        assert step_of(checkpoints(run)[-1]) == 20
        # No rank is left waiting on the other side.
        cluster_apart.wait_until(lambda: not cluster_apart.tasks(job.number))
    finally:
        links.mend(lost)
