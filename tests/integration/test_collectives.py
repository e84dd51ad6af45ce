"""What two ranks say to each other in a step: their gradients, once, and whether one was asked to stop."""

import json
from pathlib import Path

from tests.integration.collectives import FIRST, NUM_STEPS
from tests.integration.runs import start


def test_a_step_sends_its_gradients_once_and_nothing_else(recipe_file: Path, tmp_path: Path) -> None:
    # Eight micro-batches a step over both ranks; the few parameters fill one bucket.
    options = ["--batches.max_tokens_per_device", 50, "--run.log_every_steps", 100, "--run.checkpoint_every_steps", 100]
    options += [
        "--trainer.devices",
        2,
        "--trainer.val_check_interval",
        100,
        "--trainer.max_steps",
        FIRST + NUM_STEPS + 1,
    ]
    command = ["fit", "--config", recipe_file, "--run.folder", tmp_path / "run", *options]
    process = start(*command, module="tests.integration.collectives", COUNTS=str(tmp_path))
    assert process.wait() == 0
    for rank in (0, 1):
        counts = json.loads((tmp_path / f"{rank}.json").read_text())
        # The question whether to stop is a byte on a group of the CPU's own, for whose answer nobody waits.
        assert counts["called"] == {"torch.uint8": NUM_STEPS}
        assert counts["ran"] == {"gloo:all_reduce": 2 * NUM_STEPS}
