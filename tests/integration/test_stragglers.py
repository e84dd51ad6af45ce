"""A rank that is slower than the others is named, and the curves show it."""

import re
import subprocess
from pathlib import Path

import pytest

from pipeline.runtime.launch import node_name
from tests.integration.changed_program import ALL_SECONDS, SLOW_SECONDS
from tests.integration.runs import scalars, start

pytestmark = pytest.mark.slow
STEPS, EVERY = 130, 10


def fit(recipe: Path, run: Path, ranks: int, slow_rank: int, *arguments: object) -> list[str]:
    """Train; return the lines on standard error that name a slow rank."""
    options = ["--trainer.max_steps", STEPS, "--trainer.val_check_interval", STEPS, "--trainer.devices", ranks]
    options += ["--run.log_every_steps", EVERY, "--run.checkpoint_every_steps", STEPS]
    process = start(
        *("fit", "--config", recipe, "--run.folder", run, *options, *arguments),
        module="tests.integration.changed_program",
        CHANGE="slow_rank",
        stderr=subprocess.PIPE,
        SLOW_RANK=str(slow_rank),
    )
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr.decode()
    return [line for line in stderr.decode().splitlines() if "has been slow" in line]


def test_a_slow_rank_is_named_once(recipe_file: Path, tmp_path: Path) -> None:
    """Under DDP all ranks' steps take equally long: they wait for the slow one."""
    run = tmp_path / "run"
    # Several micro-batches per rank and step.
    [line] = fit(recipe_file, run, 3, 2, "--batches.max_tokens_per_device", 100)
    found = re.fullmatch(
        rf"rank 2 on {re.escape(node_name())} has been slow for 100 steps, and the others wait for it: its own part "
        r"of a step takes (.*) s, (.*) % more than the median rank's",
        line,
    )
    assert found, line
    own, percent = map(float, found.groups())
    slept = ALL_SECONDS + 2 * SLOW_SECONDS
    assert own >= slept
    # What the median rank took: it does not include waiting for the slow rank, which sleeps twice. Half of that is left
    # for ranks that wait for a processor.
    assert ALL_SECONDS <= own / (1 + percent / 100) * 1.01 <= own - SLOW_SECONDS
    ratios, ranks = (scalars(run, f"train_perf/{name}") for name in ("slowest_rank_over_median", "slowest_rank"))
    # A point is of the interval before its own, so the first one has none.
    assert [step for step, _ in ratios] == [step for step, _ in ranks] == list(range(2 * EVERY, STEPS + 1, EVERY))
    assert {rank for _, rank in ranks[1:]} == {2.0}  # the first interval is that of the start
    assert min(ratio for _, ratio in ratios[1:]) >= 1.2
    parts = {name: dict(scalars(run, f"train_perf/step_seconds{name}")) for name in ("", "_communication_wait")}
    for step in range(2 * EVERY, STEPS + 1, EVERY):  # of rank 0, which waits
        assert SLOW_SECONDS <= parts["_communication_wait"][step] <= parts[""][step] - ALL_SECONDS


def test_a_single_rank_is_compared_with_none(recipe_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert fit(recipe_file, run, 1, -1) == []
    metrics = (run / "metrics.jsonl").read_text()
    assert "slowest_rank" not in metrics
    assert "communication_wait" not in metrics
