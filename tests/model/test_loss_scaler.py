"""The loss scaler against PyTorch's, and its purpose."""

import random

import torch

from model.loss import label_smoothed_loss
from model.loss_scaler import LossScaler
from model.settings import NetworkSettings
from model.transformer import Transformer


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


def test_small_gradients_survive_float16() -> None:
    """Gradients of a token in a batch so large that they would underflow in float16."""
    torch.manual_seed(3)
    network = Transformer(60, NetworkSettings(num_layers=1, d_model=16, d_ff=32, num_heads=2, dropout=0.0))
    source, target = torch.randint(3, 60, (4, 7)), torch.randint(3, 60, (4, 9))

    def gradients(scale: float, float16: bool) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16, enabled=float16):
            states = network(source, target[:, :-1], None)
            loss = label_smoothed_loss(states, network.embedding.weight, target[:, 1:], 0.1, 0).smoothed
        found = torch.autograd.grad(loss * scale, list(network.parameters()))
        return torch.cat([gradient.flatten() for gradient in found]) / scale

    def error(found: torch.Tensor) -> float:
        return float((found - exact).norm() / exact.norm())

    exact, tiny = gradients(1.0, float16=False), 1e-9
    assert error(gradients(tiny * LossScaler().factor.item(), float16=True)) < 0.02
    assert error(gradients(tiny, float16=True)) > 0.2
