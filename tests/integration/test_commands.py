"""The commands on a trained run, called as a user calls them, and their error messages."""

import gzip
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, refusal


def test_missing_packages_are_reported() -> None:
    """As when the virtual environment is not active."""
    for command in ("fit", "doctor", "prepare"):
        command = [sys.executable, "-S", "-m", "pipeline", command, "--config", "configs/demo.yaml"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr.startswith(f"error: {sys.executable} has no ")
        assert done.stderr.endswith("; use .venv/bin/python, which make .venv/installed sets up\n")
        assert done.stderr.count("\n") == 1


def test_errors_of_the_command_line(trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "text"
    text.write_text("a\n")
    nothing = (tmp_path / "nothing").open("w+")
    monkeypatch.setattr(sys, "stdin", nothing)
    assert "'translat' is not a command" in refusal("translat")
    assert "the following arguments are required: --config" in refusal("fit", "--fresh")
    assert "--reference: is missing; give" in refusal("evaluate", trained_run, "--source", tmp_path)
    assert "--source: is missing; give" in refusal("evaluate", trained_run, "--reference", tmp_path)
    assert "the recipe has no corpus.test; give" in refusal("evaluate", trained_run)
    assert "argument '--beems'" in refusal("translate", trained_run, "--beems", 3)
    assert "--n-best 0" in refusal("translate", trained_run, "--n-best", 0)
    assert "is more than the beam, 2; raise --beam" in refusal("translate", trained_run, "--n-best", 3, "--beam", 2)
    assert "--length-penalty -1" in refusal("translate", trained_run, "--length-penalty", -1)
    assert "none.txt" in refusal("translate", trained_run, "--source", tmp_path / "none.txt")
    texts = ["--source", text, "--reference", text]
    assert "its folder does not exist" in refusal("evaluate", trained_run, *texts, "--output", tmp_path / "no" / "file")
    assert "no such checkpoint" in refusal("evaluate", trained_run, *texts, "--versus", tmp_path / "none.ckpt")
    nothing.close()


def test_paths_that_cannot_be_written(trained_run: Path, tmp_path: Path) -> None:
    # Nothing can be created below a file, even by root.
    (tmp_path / "file").touch()
    unwritable = tmp_path / "file" / "folder"
    line = refusal("export", trained_run, unwritable)
    assert f"{unwritable}: cannot be written (Not a directory ({tmp_path / 'file'})); give another folder" in line
    assert "; give another file as --output" in refusal("average", trained_run, "--last", 2, "--output", unwritable)
    truncated = tmp_path / "truncated.gz"
    truncated.write_bytes(gzip.compress(b"a house" * 99)[:-9])
    line = refusal("evaluate", trained_run, "--source", truncated, "--reference", truncated)
    assert f"{truncated}: the gzip file is truncated or damaged; copy or download it again" in line
