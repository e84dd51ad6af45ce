"""What several ranks compile, and when."""

import json
from pathlib import Path

import pytest

from tests.integration.runs import start


@pytest.mark.slow
def test_ranks_compile_once_at_the_start(tiny_corpus: Path, tmp_path: Path) -> None:
    """One graph a rank. DDP splits it at its buckets, so that some gradients are reduced while others are computed."""
    process = start(tiny_corpus, tmp_path, module="tests.integration.compile_on_ranks")
    assert process.wait(timeout=300) == 0
    one, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    for rank in (one, other):
        before, after = rank["counts"]
        assert before == after
        compilations, graphs, parts = before
        assert compilations >= graphs == 1
        assert parts > 1
    assert one["gradients"] != other["gradients"]  # of the rehearsal: they are not reduced
    assert one["weights"] == other["weights"]
