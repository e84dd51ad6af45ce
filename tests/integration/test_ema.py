"""`training.ema_decay`: what it averages, and that a resumed run averages on."""

import signal
import time
from pathlib import Path

import pytest
import torch

from pipeline.checkpointing.checkpoint import load_model
from tests.conftest import pipeline
from tests.integration.runs import checkpoints, start

DECAY = 0.5


@pytest.mark.slow
def test_a_moving_average_is_kept_and_resumed(recipe_file: Path, tmp_path: Path) -> None:
    options = ["--run.keep_last", 10, "--trainer.val_check_interval", 2]
    command = ["fit", "--config", recipe_file, "--training.ema_decay", DECAY, *options]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    # The resumed one saves at its end only.
    for run, steps, every in ((whole, 5, 1), (resumed, 3, 100), (resumed, 5, 100)):
        saving = ["--run.checkpoint_every_steps", every, "--trainer.max_steps", steps]
        done = pipeline(*command, "--run.folder", run, *saving)
        assert done.returncode == 0, done.stderr
    contents = [torch.load(path, weights_only=True) for path in checkpoints(whole)]
    name = "network.embedding.weight"
    average = contents[0]["current_model_state"][name]
    for one in contents:
        weight = one["current_model_state"][name]
        average = DECAY * average + (1 - DECAY) * weight
        torch.testing.assert_close(one["state_dict"][name], average, rtol=1e-6, atol=1e-8)
        assert one is contents[0] or not torch.equal(average, weight)
    # What translates is the average.
    torch.testing.assert_close(load_model(checkpoints(whole)[-1]).network.embedding.weight, average)
    assert_same_weights(checkpoints(resumed)[-1], checkpoints(whole)[-1])


def test_stopped_while_the_average_is_validated(recipe_file: Path, tmp_path: Path) -> None:
    command = ["fit", "--config", recipe_file, "--training.ema_decay", DECAY, "--trainer.val_check_interval", 3]
    whole, stopped, said = tmp_path / "whole", tmp_path / "stopped", tmp_path / "said"
    assert pipeline(*command, "--trainer.max_steps", 5, "--run.folder", whole).returncode == 0
    command += ["--trainer.max_steps", 5, "--run.folder", stopped]
    with said.open("w") as stderr:
        process = start(*command, module="tests.slurm.slow_ranks", SLOW_RANK="0", stderr=stderr)
    while "MOMENT validation" not in said.read_text() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75, said.read_text()
    assert "asked to stop: saved after step 3; " in said.read_text()
    assert pipeline(*command).returncode == 0
    assert_same_weights(checkpoints(stopped)[-1], checkpoints(whole)[-1])


def assert_same_weights(left: Path, right: Path) -> None:
    """Bit for bit, the average and what is trained."""
    ours, theirs = (torch.load(path, weights_only=True) for path in (left, right))
    for state in ("state_dict", "current_model_state"):
        for key, weight in theirs[state].items():
            assert torch.equal(ours[state][key], weight), (state, key)
