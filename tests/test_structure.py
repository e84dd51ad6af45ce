"""Imports go one way, and every room keeps to its own."""

import ast
from pathlib import Path

import pytest

from tests.conftest import ROOT

ALLOWED = {
    "data_module": {"data_module"},
    "model": {"model", "data_module.batching.batch"},
    "pipeline": {"pipeline", "model", "data_module"},
}
FILES = sorted(path for package in ALLOWED for path in (ROOT / package).glob("**/*.py"))


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_imports_go_one_way(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    for name in imported(path):
        if name.split(".")[0] in ALLOWED:
            allowed = any(name == ok or name.startswith(ok + ".") for ok in ALLOWED[package])
            assert allowed, f"{path.name} imports {name}"
    if package == "model" and path.name != "translation_module.py":
        assert not any(name.startswith("lightning") for name in imported(path))


def test_no_file_is_too_long() -> None:
    long = [path.name for path in FILES if len(path.read_text().splitlines()) > 300]
    assert not long
