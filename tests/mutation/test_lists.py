"""The list names tests and mutants that exist: an entry whose line has changed excuses nothing."""

import ast

import pytest
import yaml

from tests.conftest import ROOT
from tests.mutation.mutants import mutants_of

TARGETS = yaml.safe_load((ROOT / "tests" / "mutation" / "targets.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("module", TARGETS)
def test_tests_and_equivalent_mutants_exist(module: str) -> None:
    for test in TARGETS[module]["tests"]:
        path, _, name = test.partition("::")
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert not name or name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, test
    mutants = mutants_of((ROOT / module).read_text(encoding="utf-8"))
    known = {line for mutant in mutants for line in (mutant.before, mutant.after)}
    excused = {line for lines in TARGETS[module].get("equivalent", {}).values() for line in lines}
    assert excused <= known, sorted(excused - known)
