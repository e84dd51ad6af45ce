"""The test cluster, one per session. Without SLURM, its tests are skipped."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

from tests.slurm.cluster import Cluster, missing
from tests.slurm.links import Links

NOT_STARTED = "srun: error: Application launch failed"
"""What SLURM prints where one of its own daemons has not answered, as may happen on a busy machine."""


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test of this folder once more if it has failed in a run in which SLURM could not start a task.

    The project's scripts then start the job again, as they should, and the test counts one start more than its own.
    """
    if item.path.parent != Path(__file__).parent:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    before = time.time()
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    logs = [path for path in Path(tempfile.gettempdir()).glob("slurm-*/logs/job-*") if path.stat().st_mtime > before]
    if any(report.failed for report in reports) and any(NOT_STARTED in log.read_text(errors="replace") for log in logs):
        item._initrequest()
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        reports[0].sections.append(("run twice", NOT_STARTED))
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


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
