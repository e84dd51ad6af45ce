"""Output, files and file names are UTF-8 whatever the locale is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, pipeline

LOCALES = {
    "ascii streams": {"PYTHONIOENCODING": "ascii"},
    "ascii": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
}
NAME = "größe-東京"


@pytest.mark.parametrize("environment", LOCALES.values(), ids=LOCALES)
def test_output_and_file_names_are_utf8(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(
        f"corpus: {{folder: {NAME}, train: {{tsv: a}}, validation: {{tsv: a}}}}\nrun: {{folder: {NAME}}}\n",
        encoding="utf-8",
    )
    done = pipeline("recipe", "paths", "--config", "r.yaml", environment=environment, cwd=tmp_path)
    assert (done.returncode, done.stdout.splitlines()[0].decode()) == (0, NAME)
    done = pipeline("recipe", "copy", "your_text", f"{NAME}.yaml", environment=environment, cwd=tmp_path)
    assert (done.returncode, done.stdout.splitlines()[0].decode(), done.stderr) == (0, f"{NAME}.yaml", b"")
    assert (tmp_path / f"{NAME}.yaml").is_file()
    done = pipeline(NAME, environment=environment, cwd=tmp_path)
    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1)
    assert f"error: '{NAME}' is not a command" in done.stderr.decode()


def test_messages_do_not_go_to_the_output_where_standard_error_is_closed() -> None:
    closed = "import os, sys; os.close(2); os.close(0); os.execv(sys.executable, sys.argv[1:])"
    command = [sys.executable, "-c", closed, sys.executable, "-m", "pipeline", "recipe", "copy", "none"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, b"", b"")


def test_a_file_name_that_is_not_utf8_is_printed_as_it_is(tmp_path: Path) -> None:
    name = b"gr\xf6\xdfe.yaml"
    done = pipeline("recipe", "copy", "your_text", os.fsdecode(name), environment=LOCALES["ascii"], cwd=tmp_path)
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, name)
