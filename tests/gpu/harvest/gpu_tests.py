"""Stage `gpu_tests`: the tests that need a GPU and are not slow, then the other fast ones of `tests/gpu`."""

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
        """Set-up, call and tear-down are three reports; the last one that says something counts."""
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration
        if report.when == "call" or report.outcome != "passed":
            why = {} if report.outcome == "passed" else {"why": report.longreprtext[-1500:]}
            seconds = self._seconds[report.nodeid]
            self._job.record(report.nodeid, phase=report.when, outcome=report.outcome, seconds=seconds, **why)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A module that cannot be imported has no tests to report."""
        if report.outcome != "passed":
            self._job.record(report.nodeid, phase="collect", outcome=report.outcome, why=report.longreprtext[-1500:])


def run(job: Job) -> None:
    """Run them in this process, which is a stage's own."""
    for marks, paths in RUNS:
        run_tests(job, marks, paths)


def run_tests(job: Job, marks: str, arguments: list[str]) -> None:
    """One run of pytest."""
    options = ["-m", marks, "-p", "no:cacheprovider", "--ignore", "tests/gpu/test_harvest.py"]
    options.append("--continue-on-collection-errors")
    code = pytest.main([*options, *arguments], plugins=[Reporter(job)])
    sys.stdout.flush()
    job.record(f"pytest -m {marks!r}", exit_code=int(code))
