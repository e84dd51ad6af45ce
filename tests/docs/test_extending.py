"""The examples of docs/extending.md run."""

import copy
import re
from pathlib import Path

import pytest

from pipeline.inference import metrics
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))


def blocks(section: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", SECTIONS)
def test_example(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a section run one after another, as one program, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(metrics, "METRICS", copy.copy(metrics.METRICS))
    found = blocks(SECTIONS[name])
    assert found, "a section without an example"
    exec(compile("\n".join(found), name, "exec"), {"__name__": "example"})
