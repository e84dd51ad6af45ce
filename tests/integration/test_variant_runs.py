"""Runs on variants of the training text: stopped within and across epochs, they continue on any number of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.data_module.test_preparation import pairs_of_text, write_pairs
from tests.integration.runs import checkpoints, start


@pytest.mark.slow
def test_resumed_on_two_ranks_and_on_one(tmp_path: Path) -> None:
    """The weights differ by rounding alone, about 1e-8; another variant's by 1e-3. Epochs have about 20 steps."""
    train = write_pairs(tmp_path, "train", pairs_of_text(4_000, 1))
    validation = write_pairs(tmp_path, "validation", pairs_of_text(20, 2))
    values: dict[str, Any] = {
        "corpus": {
            "folder": str(tmp_path / "corpus"),
            "train": {"source": train.source, "target": train.target},
            "validation": {"source": validation.source, "target": validation.target},
            "vocabulary_size": 80,
            "variants": 2,
            "bpe_dropout": {"source": 0.2, "target": 0.2},
            "noise": {"typos": 0.1},
        },
        "batches": {"batch_tokens": 4000, "workers": 2},
        "network": {"num_layers": 1, "d_model": 16, "d_ff": 32, "num_heads": 2, "dropout": 0},
        # The gradient of key biases is only rounding error, which Adam amplifies with the paper's epsilon of 1e-9.
        "training": {"adam_epsilon": 1e-3},
        "run": {"checkpoint_every_steps": 7, "log_every_steps": 10},
        "trainer": {"precision": "64-true", "val_check_interval": 1000, "accelerator": "cpu", "devices": 1},
    }
    recipe = tmp_path / "variants.yaml"
    recipe.write_text(yaml.safe_dump(values))
    one, two = tmp_path / "one", tmp_path / "two"
    command = ["fit", "--config", recipe, "--run.folder"]
    assert start(*command, one, "--trainer.max_steps", 60).wait(300) == 0
    for devices, steps in ((2, 25), (1, 45), (2, 60)):
        (tmp_path / f"node{steps}").mkdir()
        options = ["--trainer.devices", devices, "--trainer.max_steps", steps]
        assert start(*command, two, *options, TMPDIR=str(tmp_path / f"node{steps}")).wait(300) == 0
    expected, found = (torch.load(checkpoints(run)[-1], weights_only=True)["state_dict"] for run in (one, two))
    for name, weight in expected.items():
        torch.testing.assert_close(weight, found[name], rtol=0, atol=1e-5, msg=name)
