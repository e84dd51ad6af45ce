"""The schedule against values worked by hand."""

import pytest

from model.noam_schedule import noam_learning_rate


def test_peak_of_the_base_model() -> None:
    # 512^-0.5 * 4000^-0.5 = 0.0441942 * 0.0158114
    assert noam_learning_rate(4000, 512, 4000) == pytest.approx(6.98771e-4, abs=1e-9)


def test_first_step_and_decay() -> None:
    assert noam_learning_rate(1, 512, 4000) == pytest.approx(512**-0.5 * 4000**-1.5)
    assert noam_learning_rate(2000, 512, 4000) == pytest.approx(noam_learning_rate(4000, 512, 4000) / 2)
    assert noam_learning_rate(16000, 512, 4000) == pytest.approx(noam_learning_rate(4000, 512, 4000) / 2)
    assert noam_learning_rate(123, 512, 4000, 2.5) == pytest.approx(2.5 * noam_learning_rate(123, 512, 4000))


@pytest.mark.parametrize(("step", "warmup"), [(0, 4000), (-1, 4000), (1, 0)])
def test_steps_count_from_one(step: int, warmup: int) -> None:
    with pytest.raises(ValueError, match="1 or more"):
        noam_learning_rate(step, 512, warmup)
