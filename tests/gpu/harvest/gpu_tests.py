"""Stage `gpu_tests`: the fast tests that need a GPU, then the other fast tests of `tests/gpu`."""

import sys

import pytest

from tests.gpu.harvest.job import Job

RUNS = [
    ("gpu and not slow", ["tests/gpu", "tests/model/test_compilation.py", "tests/model/test_decoding_everywhere.py"]),
    ("not gpu and not slow", ["tests/gpu"]),
]


class Reporter:
    """A pytest plugin that records each test's outcome when it ends."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the report of the call, or of a set-up or tear-down that did not pass."""
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration
        if report.when == "call" or report.outcome != "passed":
            why = {} if report.outcome == "passed" else {"why": report.longreprtext[-1500:]}
            seconds = self._seconds[report.nodeid]
            self._job.record(report.nodeid, phase=report.when, outcome=report.outcome, seconds=seconds, **why)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record a module that cannot be imported."""
        if report.outcome != "passed":
            self._job.record(report.nodeid, phase="collect", outcome=report.outcome, why=report.longreprtext[-1500:])


def run(job: Job) -> None:
    """Run the stage, in this process."""
    for marks, paths in RUNS:
        run_tests(job, marks, paths)


def run_tests(job: Job, marks: str, arguments: list[str]) -> None:
    """Run pytest and record its exit code."""
    options = ["-m", marks, "-p", "no:cacheprovider", "--ignore", "tests/gpu/test_harvest.py"]
    options.append("--continue-on-collection-errors")
    code = pytest.main([*options, *arguments], plugins=[Reporter(job)])
    sys.stdout.flush()
    job.record(f"pytest -m {marks!r}", exit_code=int(code))
