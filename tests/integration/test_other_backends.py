"""Ranks that compute in different ways."""

import json
import subprocess
from pathlib import Path

import pytest

from pipeline.runtime.launch import node_name
from tests.integration.runs import start


@pytest.mark.slow
def test_a_rank_with_another_backend_is_named_and_trains_the_same(recipe_file: Path, tmp_path: Path) -> None:
    """Without dropout, whose masks depend on the layout of rows."""
    options = [
        "--trainer.devices",
        2,
        "--trainer.max_steps",
        4,
        "--trainer.precision",
        "32-true",
        "--trainer.accelerator",
    ]
    options += ["cpu", "--run.log_every_steps", 1, "--network.dropout", 0, "--batches.max_tokens_per_device", 100]
    logged, lines, computed = {}, {}, {}
    for change in ("nothing", "other_backend"):
        run = tmp_path / change
        process = start(
            *("fit", "--config", recipe_file, "--run.folder", run, *options),
            module="tests.integration.changed_program",
            stderr=subprocess.PIPE,
            CHANGE=change,
        )
        _, stderr = process.communicate(timeout=300)
        assert process.returncode == 0, stderr.decode()
        lines[change] = [line for line in stderr.decode().splitlines() if line.startswith("another backend")]
        computed[change] = "computed by the other backend" in stderr.decode()
        metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        logged[change] = [[m["train/gradient_norm"], m["train/loss"]] for m in metrics if "train/loss" in m]
    assert lines == {
        "nothing": [],
        "other_backend": [
            f"another backend than rank 0's on rank 1 on {node_name()}: attention flash, not plain; loss PyTorch, not"
            " C++ (no compiler); results agree up to rounding, and all ranks wait for the slowest one"
        ],
    }
    assert computed == {"nothing": False, "other_backend": True}
    assert len(logged["nothing"]) == 4
    for ours, theirs in zip(logged["other_backend"], logged["nothing"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
