"""The schedules against values computed by hand, and the loss scaler against PyTorch's."""

import math
import random

import pytest
import torch

from model.optimization import LossScaler, build_schedule
from model.settings import TrainingSettings


def rate(step: int, d_model: int = 512, max_steps: int = 100_000, **settings: float | str) -> float:
    return build_schedule(TrainingSettings(**settings), d_model, max_steps)(step)  # type: ignore[arg-type]


def test_the_papers_schedule_by_hand() -> None:
    # 512^-0.5 * 4000^-0.5 = 0.0441942 * 0.0158114
    assert rate(4000) == pytest.approx(6.98771e-4, abs=1e-9)
    assert rate(1) == pytest.approx(512**-0.5 * 4000**-1.5)
    assert rate(2000) == pytest.approx(rate(4000) / 2)
    assert rate(16000) == pytest.approx(rate(4000) / 2)
    assert rate(123, learning_rate_factor=2.5) == pytest.approx(2.5 * rate(123))
    assert rate(4, 16, warmup_steps=4) == pytest.approx(0.25 * 0.5)


def test_the_last_step_has_no_effect() -> None:
    assert rate(123, max_steps=123) == rate(123, max_steps=100_000) == rate(123, max_steps=-1)


@pytest.mark.parametrize(
    ("schedule", "max_steps", "expected"),
    [
        *((one, 24, {1: 0.2, 2: 0.4, 3: 0.6, 4: 0.8}) for one in ("inverse_sqrt", "linear", "cosine")),
        ("inverse_sqrt", 24, {16: 0.4, 64: 0.2, 10_000: 0.016}),
        # 21 steps from the peak to 0, which would be step 25.
        ("linear", 24, {5: 0.8 * 20 / 21, 11: 0.8 * 14 / 21, 24: 0.8 / 21, 25: 0.0, 26: 0.0, 1000: 0.0}),
        # A third of the way is 60 degrees, two thirds are 120.
        (
            "cosine",
            24,
            {11: 0.8 * 0.75, 18: 0.8 * 0.25, 24: 0.4 * (1 + math.cos(math.pi * 20 / 21)), 25: 0.0, 1000: 0.0},
        ),
        # Without a last step nothing decays, and the warm-up may end after it.
        *((one, -1, {5: 0.8, 10**6: 0.8}) for one in ("linear", "cosine")),
        *((one, 2, {2: 0.4, 4: 0.8}) for one in ("linear", "cosine")),
    ],
)
def test_a_warm_up_of_four_steps_to_a_peak_and_the_decay(
    schedule: str, max_steps: int, expected: dict[int, float]
) -> None:
    settings = {"schedule": schedule, "peak_learning_rate": 0.4, "learning_rate_factor": 2.0, "warmup_steps": 4}
    assert {step: rate(step, 512, max_steps, **settings) for step in expected} == pytest.approx(expected, abs=1e-12)


def test_inverse_square_root_is_the_papers_schedule_with_a_peak_of_its_own() -> None:
    peak = 512**-0.5 * 4000**-0.5
    for step in (1, 3999, 4000, 4001, 50_000):
        assert rate(step, schedule="inverse_sqrt", peak_learning_rate=peak) == pytest.approx(rate(step))


@pytest.mark.parametrize("schedule", ["paper", "linear"])
@pytest.mark.parametrize("step", [0, -1])
def test_steps_count_from_one(step: int, schedule: str) -> None:
    peak = {} if schedule == "paper" else {"peak_learning_rate": 1.0}
    with pytest.raises(ValueError, match="1 or more"):
        rate(step, schedule=schedule, **peak)


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
