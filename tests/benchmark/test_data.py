"""`data` on a tiny corpus: its figures."""

import json
from pathlib import Path

import pytest

from tests.benchmark import data
from tests.benchmark.__main__ import main


def test_figures(recipe_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "LARGE", 1_000_000)
    assert main(["data", str(recipe_file)]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["pairs"] == 300
    assert figures["pairs_planned"] >= data.LARGE
    positive = ("pairs_per_second", "loader_target_tokens_per_second", "plan_seconds")
    assert all(figures[name] > 0 for name in positive)
