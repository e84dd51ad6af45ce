"""The schedule against values worked by hand."""

import pytest

from model.lr_schedule import noam_learning_rate
from model.settings import TrainingSettings

PAPER = TrainingSettings()


def test_peak_of_the_base_model() -> None:
    # 512^-0.5 * 4000^-0.5 = 0.0441942 * 0.0158114
    assert noam_learning_rate(4000, 512, PAPER) == pytest.approx(6.98771e-4, abs=1e-9)


def test_first_step_and_decay() -> None:
    assert noam_learning_rate(1, 512, PAPER) == pytest.approx(512**-0.5 * 4000**-1.5)
    assert noam_learning_rate(2000, 512, PAPER) == pytest.approx(noam_learning_rate(4000, 512, PAPER) / 2)
    assert noam_learning_rate(16000, 512, PAPER) == pytest.approx(noam_learning_rate(4000, 512, PAPER) / 2)
    larger = TrainingSettings(learning_rate_factor=2.5)
    assert noam_learning_rate(123, 512, larger) == pytest.approx(2.5 * noam_learning_rate(123, 512, PAPER))


def test_the_warm_up_is_the_recipes() -> None:
    assert noam_learning_rate(4, 16, TrainingSettings(warmup_steps=4)) == pytest.approx(0.25 * 0.5)


@pytest.mark.parametrize("step", [0, -1])
def test_steps_count_from_one(step: int) -> None:
    with pytest.raises(ValueError, match="1 or more"):
        noam_learning_rate(step, 512, PAPER)
    with pytest.raises(ValueError, match="1 or more"):
        TrainingSettings(warmup_steps=step)
