"""The schedules against values computed by hand, and the loss scaler against PyTorch's."""

import math
import random

import pytest
import torch

from model.optimization import LossScaler, build_schedule
from model.settings import TrainingSettings


def rate(step: int, d_model: int = 512, max_steps: int = 100_000, **settings: float | str) -> float:
    return build_schedule(TrainingSettings(**settings), d_model, max_steps)(step)  # type: ignore[arg-type]


def test_peak_of_the_base_model() -> None:
    # 512^-0.5 * 4000^-0.5 = 0.0441942 * 0.0158114
    assert rate(4000) == pytest.approx(6.98771e-4, abs=1e-9)


def test_first_step_and_decay() -> None:
    assert rate(1) == pytest.approx(512**-0.5 * 4000**-1.5)
    assert rate(2000) == pytest.approx(rate(4000) / 2)
    assert rate(16000) == pytest.approx(rate(4000) / 2)
    assert rate(123, learning_rate_factor=2.5) == pytest.approx(2.5 * rate(123))


def test_the_last_step_has_no_effect() -> None:
    assert rate(123, max_steps=123) == rate(123, max_steps=100_000) == rate(123, max_steps=-1)


def test_the_warm_up_is_the_recipes() -> None:
    assert rate(4, 16, warmup_steps=4) == pytest.approx(0.25 * 0.5)


def rates(schedule: str, steps: list[int], max_steps: int = 24) -> list[float]:
    """Return the rates of a schedule with a warm-up of 4 steps to 0.8."""
    settings = {"schedule": schedule, "peak_learning_rate": 0.4, "learning_rate_factor": 2.0, "warmup_steps": 4}
    return [rate(step, 512, max_steps, **settings) for step in steps]


@pytest.mark.parametrize("schedule", ["inverse_sqrt", "linear", "cosine"])
def test_the_others_rise_linearly_to_their_peak(schedule: str) -> None:
    assert rates(schedule, [1, 2, 3, 4]) == pytest.approx([0.2, 0.4, 0.6, 0.8])


def test_inverse_square_root() -> None:
    assert rates("inverse_sqrt", [16, 64, 10_000]) == pytest.approx([0.4, 0.2, 0.016])
    # The paper's schedule with its own peak.
    peak = 512**-0.5 * 4000**-0.5
    for step in (1, 3999, 4000, 4001, 50_000):
        settings = {"schedule": "inverse_sqrt", "peak_learning_rate": peak}
        assert rate(step, **settings) == pytest.approx(rate(step))


def test_linear_decay() -> None:
    """21 steps from the peak to 0, which would be step 25."""
    assert rates("linear", [5, 11, 24]) == pytest.approx([0.8 * 20 / 21, 0.8 * 14 / 21, 0.8 / 21])
    assert rates("linear", [25, 26, 1000]) == [0.0, 0.0, 0.0]


def test_cosine_decay() -> None:
    """A third of the way is 60 degrees, two thirds are 120."""
    assert rates("cosine", [11, 18]) == pytest.approx([0.8 * 0.75, 0.8 * 0.25])
    assert rates("cosine", [24]) == pytest.approx([0.4 * (1 + math.cos(math.pi * 20 / 21))])
    assert rates("cosine", [25, 1000]) == pytest.approx([0.0, 0.0], abs=1e-12)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_without_a_last_step_nothing_decays(schedule: str) -> None:
    assert rates(schedule, [5, 10**6], max_steps=-1) == pytest.approx([0.8, 0.8])


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_warm_up_until_after_the_end(schedule: str) -> None:
    assert rates(schedule, [2, 4], max_steps=2) == pytest.approx([0.4, 0.8])


@pytest.mark.parametrize("schedule", ["paper", "linear"])
@pytest.mark.parametrize("step", [0, -1])
def test_steps_count_from_one(step: int, schedule: str) -> None:
    peak = {} if schedule == "paper" else {"peak_learning_rate": 1.0}
    with pytest.raises(ValueError, match="1 or more"):
        rate(step, schedule=schedule, **peak)
    with pytest.raises(ValueError, match="1 or more"):
        TrainingSettings(warmup_steps=step)


def test_the_factor_on_the_loss_is_that_of_the_frameworks_scaler() -> None:
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
