"""The test cluster, once a session; without SLURM its tests are skipped in one line."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, missing


@pytest.fixture(scope="session")
def whole_cluster() -> Iterator[Cluster]:
    if lacking := missing():
        pytest.skip(f"no SLURM here ({', '.join(lacking)}): apt-get install slurm-wlm munge")
    # Not pytest's own folder, whose path is too long for a socket and closed to others.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    cluster = Cluster(folder, num_nodes=3)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def cluster(whole_cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, idle before and after a test."""
    whole_cluster.wait_until(whole_cluster.is_idle, 60)
    yield whole_cluster
    whole_cluster.cancel_all()
