"""The whole product once, as `make demo` runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT


def demo(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pipeline", "demo"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_demo_learns_its_grammar(tmp_path: Path) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    first = demo(tmp_path)
    assert first.returncode == 0, first.stderr
    stages = json.loads((tmp_path / "runs" / "demo-stages.json").read_text())
    scores = {
        name: json.loads(stages[f"evaluate {name}"]["output"].splitlines()[-1])
        for name in ("test", "test_new_combinations")
    }
    assert scores["test"]["bleu"] >= 90
    assert scores["test_new_combinations"]["bleu"] >= 85
    for what in ("BLEU signature nrefs:1", "chrF signature", "translation ", "reference ", "tensorboard", "export"):
        assert what in first.stdout
    assert (tmp_path / "runs" / "demo" / "export" / "model.ts").exists()
    again = demo(tmp_path)
    assert again.returncode == 0
    assert "$ python" not in again.stderr  # nothing is done twice
    assert again.stdout == first.stdout
