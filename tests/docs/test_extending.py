"""The examples of docs/extending.md run."""

import copy
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest

from pipeline.inference import metrics
from tests.conftest import ROOT
from tests.docs import pages

PAGE = pages.read(ROOT / "docs" / "extending.md")
REGISTRIES = [
    "pipeline.inference.metrics.METRICS",
    "data_module.corpus.readers.READERS",
    "model.optimization.SCHEDULES",
    "model.optimization.OPTIMIZERS",
    "model.layers.NORMS",
    "model.layers.ACTIVATIONS",
    "model.layers.SELF_ATTENTIONS",
]
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))


def blocks(section: str) -> list[str]:
    return [block.text for block in pages.blocks(section) if block.language == "python"]


@pytest.fixture(autouse=True)
def registries_restored() -> Iterator[None]:
    """What an example registers is gone after it."""
    with ExitStack() as stack:
        for registry in REGISTRIES:
            stack.enter_context(mock.patch.dict(registry))
        yield


@pytest.mark.parametrize("name", SECTIONS)
def test_example(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a section run one after another, as one program, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(metrics, "METRICS", copy.copy(metrics.METRICS))
    found = blocks(SECTIONS[name])
    assert found, "a section without an example"
    exec(compile("\n".join(found), name, "exec"), {"__name__": "example"})
