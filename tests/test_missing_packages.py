"""Test modules whose packages are not installed do not keep the others from being collected, but in CI."""

from pathlib import Path

import pytest

from tests import conftest


class Collected:
    """Each module's outcome, and the tests that were collected."""

    def __init__(self) -> None:
        self.modules: dict[str, tuple[str, str]] = {}
        self.tests: list[str] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.modules[Path(report.nodeid).name] = (report.outcome, report.longreprtext)

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        self.tests.append(item.name)


@pytest.mark.parametrize("in_ci", [False, True])
def test_a_missing_package_skips_its_module_but_in_ci(
    in_ci: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", str(in_ci).lower())
    # Names of their own: a failed import may leave its module behind.
    package, ours = f"test_package_{in_ci}.py", f"test_ours_{in_ci}.py"
    (tmp_path / "test_there.py").write_text("def test_there(): pass\n")
    (tmp_path / package).write_text("import no_such_package.part\n")
    (tmp_path / ours).write_text("import pipeline.no_such_file\n")
    collected = Collected()
    pytest.main(
        ["--collect-only", "-q", "--import-mode=importlib", "-c", "/dev/null", str(tmp_path)],
        plugins=[conftest, collected],
    )
    assert collected.tests == ["test_there"]
    outcome, why = collected.modules[package]
    assert outcome == ("failed" if in_ci else "skipped")
    assert "no_such_package" in why
    assert collected.modules[ours][0] == "failed"
