"""The collectives of a training step: one all-reduce of the gradients and one of the stop flags."""

import json
from pathlib import Path

from tests.integration.changed_program import COUNTED_FROM, NUM_COUNTED
from tests.integration.runs import start


def test_a_step_reduces_its_gradients_once(recipe_file: Path, tmp_path: Path) -> None:
    # Several micro-batches per rank and step; all parameters fit into one bucket.
    options = ["--batches.max_tokens_per_device", 100, "--trainer.devices", 2]
    options += ["--run.log_every_steps", 100, "--run.checkpoint_every_steps", 100, "--trainer.val_check_interval", 100]
    options += ["--trainer.max_steps", COUNTED_FROM + NUM_COUNTED + 1]
    command = ["fit", "--config", recipe_file, "--run.folder", tmp_path / "run", *options]
    process = start(
        *command, module="tests.integration.changed_program", CHANGE="count_collectives", COUNTS=str(tmp_path)
    )
    assert process.wait() == 0
    for rank in (0, 1):
        counts = json.loads((tmp_path / f"{rank}.json").read_text())
        # The stop flag is one byte, reduced asynchronously in a process group of its own.
        assert counts["called"] == {"torch.uint8": NUM_COUNTED}
        assert counts["ran"] == {"gloo:all_reduce": 2 * NUM_COUNTED}
