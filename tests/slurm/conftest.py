"""The test cluster, one per session. Without SLURM, its tests are skipped."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, missing
from tests.slurm.links import Links


def started(num_nodes: int, links: Links | None = None) -> Iterator[Cluster]:
    if lacking := missing():
        pytest.skip(f"SLURM is not installed ({', '.join(lacking)}): apt-get install slurm-wlm munge")
    # Not pytest's folder: its path is too long for a socket, and other users cannot read it.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    cluster = Cluster(folder, num_nodes, links)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def whole_cluster() -> Iterator[Cluster]:
    yield from started(4)


@pytest.fixture(scope="module")
def links() -> Iterator[Links]:
    """The links of three nodes."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2: apt-get install iproute2")
    made = Links(num_nodes=3)
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def cluster_apart(links: Links) -> Iterator[Cluster]:
    """A cluster whose nodes reach one another by these links only."""
    yield from started(3, links)


@pytest.fixture
def cluster(whole_cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, idle before and after a test."""
    whole_cluster.make_idle()
    yield whole_cluster
    whole_cluster.cancel_all()
