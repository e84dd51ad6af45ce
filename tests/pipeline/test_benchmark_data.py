"""`benchmark data` on a tiny corpus: its figures."""

import json
from pathlib import Path

import pytest

from pipeline.__main__ import main
from pipeline.benchmark import data


def test_figures(recipe_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "LARGE", 1_000_000)
    assert main(["benchmark", "data", "--config", str(recipe_file)]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["pairs"] == figures["pairs_planned"] == 300
    assert figures["pairs_planned_large"] >= data.LARGE
    rates = ("pairs_per_second", "loader_target_tokens_per_second")
    seconds = ("plan_seconds", "plan_seconds_large", "division_processor_seconds")
    assert all(figures[name] > 0 for name in (*rates, *seconds, "peak_memory_bytes"))
