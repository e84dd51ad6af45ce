"""Output, files and file names are UTF-8 whatever the locale is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

LOCALES = {
    "ascii streams": {"PYTHONIOENCODING": "ascii"},
    "ascii": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
}
NAME = "größe-東京"


def run(words: list[str], folder: Path, environment: dict[str, str]) -> tuple[int, bytes, bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, check=False, timeout=300
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("environment", LOCALES.values(), ids=LOCALES)
def test_output_and_file_names_are_utf8(environment: dict[str, str], tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"corpus: {{folder: {NAME}, train: {{tsv: a}}, validation: {{tsv: a}}}}\nrun: {{folder: {NAME}}}\n",
        encoding="utf-8",
    )
    code, output, _ = run(["-m", "pipeline", "recipe", "paths", "--config", "r.yaml"], tmp_path, environment)
    assert (code, output.splitlines()[0].decode()) == (0, NAME)
    code, output, errors = run(["-m", "pipeline", "recipe", "copy", "your_text", f"{NAME}.yaml"], tmp_path, environment)
    assert (code, output.splitlines()[0].decode(), errors) == (0, f"{NAME}.yaml", b"")
    assert (tmp_path / f"{NAME}.yaml").is_file()
    code, _, errors = run(["-m", "pipeline", NAME], tmp_path, environment)
    assert (code, errors.count(b"\n")) == (2, 1)
    assert f"error: '{NAME}' is not a command" in errors.decode()


def test_messages_do_not_go_to_the_output_where_standard_error_is_closed(tmp_path: Path) -> None:
    closed = ["-c", "import os, sys; os.close(2); os.close(0); os.execv(sys.executable, sys.argv[1:])"]
    words = [sys.executable, "-m", "pipeline", "recipe", "copy", "none"]
    assert run([*closed, *words], tmp_path, {}) == (2, b"", b"")


def test_a_file_name_that_is_not_utf8_is_printed_as_it_is(tmp_path: Path) -> None:
    name = b"gr\xf6\xdfe.yaml"
    words = ["-m", "pipeline", "recipe", "copy", "your_text", os.fsdecode(name)]
    code, output, _ = run(words, tmp_path, LOCALES["ascii"])
    assert (code, output.splitlines()[0]) == (0, name)
