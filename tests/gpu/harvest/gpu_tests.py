"""Stage `gpu_tests`: the fast tests that need a GPU, then the other fast tests of `tests/gpu`."""

import sys

import pytest

from tests.gpu.harvest.job import Job


class Reporter:
    """A pytest plugin that records each test's outcome when it ends."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the report of the call, or of a set-up or tear-down that did not pass."""
        if report.when == "call" or report.outcome != "passed":
            self._record(report, phase=report.when, seconds=report.duration)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record a module that cannot be imported."""
        if report.outcome != "passed":
            self._record(report, phase="collect")

    def _record(self, report: pytest.TestReport | pytest.CollectReport, **values: object) -> None:
        why = {} if report.outcome == "passed" else {"why": report.longreprtext[-1500:]}
        self._job.record(report.nodeid, outcome=report.outcome, **values, **why)


def run_gpu_tests(job: Job) -> None:
    """Run the stage, in this process."""
    others = ["tests/model/test_compilation.py", "tests/model/test_decoding_everywhere.py"]
    run_tests(job, "gpu and not slow", ["tests/gpu", *others])
    run_tests(job, "not gpu and not slow", ["tests/gpu"])


def run_tests(job: Job, marks: str, arguments: list[str]) -> None:
    """Run pytest and record its exit code."""
    options = ["-m", marks, "-p", "no:cacheprovider", "--ignore", "tests/gpu/test_harvest.py"]
    code = pytest.main([*options, "--continue-on-collection-errors", *arguments], plugins=[Reporter(job)])
    sys.stdout.flush()
    job.record(f"pytest -m {marks!r}", exit_code=int(code))
