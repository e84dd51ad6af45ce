"""The loss scaler against PyTorch's, and its purpose."""

import random

import torch

from model.loss_scaler import LossScaler


def test_the_factor_is_that_of_the_frameworks_scaler() -> None:
    """5,000 steps: some are skipped at random, then enough finite ones follow for the factor to grow."""
    chance = random.Random(3)
    skipped = [float(chance.random() < 0.01) for _ in range(500)] + [0.0] * 4500
    ours, tracker = LossScaler(), torch.zeros((), dtype=torch.int32)
    theirs = torch.tensor(2.0**16)
    for skip in skipped:
        ours.update(torch.tensor(skip))
        torch._amp_update_scale_(theirs, tracker, torch.tensor(skip), 2.0, 0.5, 2000)
        assert ours.state() == [theirs.item(), float(tracker)]
    assert ours.state()[0] != 2.0**16
    again = LossScaler()
    again.load_state(ours.state())
    assert again.state() == ours.state()
