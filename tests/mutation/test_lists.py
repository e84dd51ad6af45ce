"""The lists name modules, tests and source lines that exist: an entry whose line has changed excuses nothing."""

import ast
from pathlib import Path
from typing import Any

import yaml

from tests.conftest import ROOT

HERE = Path(__file__).parent


def listed(name: str) -> Any:
    return yaml.safe_load((HERE / name).read_text(encoding="utf-8"))


def test_targets_exist() -> None:
    for module, tests in listed("targets.yaml").items():
        assert (ROOT / module).is_file(), module
        for test in tests:
            path, _, name = test.partition("::")
            assert (ROOT / path).is_file(), test
            names = {node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if hasattr(node, "name")}
            assert not name or name.partition("[")[0] in names, test


def test_excused_lines_exist() -> None:
    stale = []
    for entry in listed("equivalent.yaml"):
        source = (ROOT / entry["module"]).read_text(encoding="utf-8") if (ROOT / entry["module"]).is_file() else ""
        if entry["before"] not in [line.strip() for line in source.splitlines()]:
            stale.append(f"{entry['module']}: {entry['before']}")
    assert not stale, "\n".join(stale)
