"""`training.ema_decay`: what is averaged, and that a resumed run continues the average."""

from pathlib import Path

import pytest
import torch

from pipeline.checkpointing.checkpoint import load_model
from tests.conftest import pipeline
from tests.integration.runs import checkpoints

DECAY = 0.5


@pytest.mark.slow
def test_the_moving_average_is_saved_and_resumed(recipe_file: Path, tmp_path: Path) -> None:
    options = ["--run.keep_last", 10, "--trainer.val_check_interval", 2]
    command = ["fit", "--config", recipe_file, "--training.ema_decay", DECAY, *options]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    # The resumed run saves only at its end.
    for run, steps, every in ((whole, 5, 1), (resumed, 3, 100), (resumed, 5, 100)):
        saving = ["--run.checkpoint_every_steps", every, "--trainer.max_steps", steps]
        done = pipeline(*command, "--run.folder", run, *saving)
        assert done.returncode == 0, done.stderr
    contents = [torch.load(path, weights_only=True) for path in checkpoints(whole)]
    name = "network.embedding.weight"
    average = contents[0]["current_model_state"][name]
    for checkpoint in contents:
        weight = checkpoint["current_model_state"][name]
        average = DECAY * average + (1 - DECAY) * weight
        torch.testing.assert_close(checkpoint["state_dict"][name], average, rtol=1e-6, atol=1e-8)
        assert checkpoint is contents[0] or not torch.equal(average, weight)
    # Translation uses the average.
    torch.testing.assert_close(load_model(checkpoints(whole)[-1]).network.embedding.weight, average)
    assert_same_weights(checkpoints(resumed)[-1], checkpoints(whole)[-1])


def assert_same_weights(left: Path, right: Path) -> None:
    """Check that averages and trained weights are equal bit for bit."""
    left_state, right_state = (torch.load(path, weights_only=True) for path in (left, right))
    for state in ("state_dict", "current_model_state"):
        for key, weight in right_state[state].items():
            assert torch.equal(left_state[state][key], weight), (state, key)
