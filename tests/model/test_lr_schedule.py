"""The paper's schedule against values computed by hand."""

import pytest

from model.lr_schedule import build_schedule
from model.settings import TrainingSettings


def rate(step: int, d_model: int = 512, max_steps: int = 100_000, **settings: float) -> float:
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


@pytest.mark.parametrize("step", [0, -1])
def test_steps_count_from_one(step: int) -> None:
    with pytest.raises(ValueError, match="1 or more"):
        rate(step)
    with pytest.raises(ValueError, match="1 or more"):
        TrainingSettings(warmup_steps=step)


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match=r"training\.schedule 'papers' is not registered; did you mean paper\?"):
        rate(1, schedule="papers")  # type: ignore[arg-type]
