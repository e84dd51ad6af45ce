"""Learning-rate schedules. The recipe's `training.schedule` names one; "paper" is that of section 5.3.

The others rise linearly from 0 to `training.peak_learning_rate` within `training.warmup_steps`, and then decay.
"""

import math
from collections.abc import Callable

from model.registry import Registry
from model.settings import TrainingSettings

Schedule = Callable[[int], float]
"""Maps the number of the step that is about to be taken, from 1, to its learning rate."""


def paper_schedule(settings: TrainingSettings, d_model: int, max_steps: int) -> Schedule:
    """Return the schedule of equation 3: factor * d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5).

    The rate rises linearly for `warmup_steps` steps, then decays with the inverse square root of the step. It does
    not depend on `max_steps`, so a run can be continued with a larger `trainer.max_steps`.
    """

    def learning_rate(step: int) -> float:
        if step < 1:
            raise ValueError(f"step {step} must be 1 or more")
        return settings.learning_rate_factor * d_model**-0.5 * min(step**-0.5, step * settings.warmup_steps**-1.5)

    return learning_rate


def inverse_sqrt_schedule(settings: TrainingSettings, d_model: int, max_steps: int) -> Schedule:
    """Return the shape of the paper's schedule with a peak of its own: peak * sqrt(warmup_steps / step) at the end.

    Neither `d_model` nor `max_steps` have an effect. fairseq's schedule of this name starts at 1e-7 instead of 0.
    """
    return _decay_after_warmup(settings, lambda step: math.sqrt(settings.warmup_steps / step))


def linear_schedule(settings: TrainingSettings, d_model: int, max_steps: int) -> Schedule:
    """Return a schedule that decays linearly and reaches 0 one step after `max_steps`."""
    return _decay_after_warmup(settings, lambda step: 1.0 - _progress(settings, step, max_steps))


def cosine_schedule(settings: TrainingSettings, d_model: int, max_steps: int) -> Schedule:
    """Return a schedule that decays as half a cosine (Loshchilov and Hutter 2017), to 0 one step after `max_steps`."""
    return _decay_after_warmup(
        settings, lambda step: 0.5 + 0.5 * math.cos(math.pi * _progress(settings, step, max_steps))
    )


def _decay_after_warmup(settings: TrainingSettings, decay: Callable[[int], float]) -> Schedule:
    """Return a schedule that is `decay`, a factor on the peak, of the steps after the warm-up."""
    assert settings.peak_learning_rate is not None
    peak = settings.learning_rate_factor * settings.peak_learning_rate

    def learning_rate(step: int) -> float:
        if step < 1:
            raise ValueError(f"step {step} must be 1 or more")
        return peak * (step / settings.warmup_steps if step <= settings.warmup_steps else decay(step))

    return learning_rate


def _progress(settings: TrainingSettings, step: int, max_steps: int) -> float:
    """Return the share of the steps after the warm-up that lie before `step`, at most 1.

    Without a last step (`max_steps` below 1) there is no progress.
    """
    if max_steps < 1:
        return 0.0
    return min(1.0, (step - settings.warmup_steps) / (max_steps + 1 - settings.warmup_steps))


DECAY_TO_LAST_STEP = {"linear", "cosine"}
"""Schedules that depend on `trainer.max_steps`, which therefore must stay as it is when a run is resumed."""

SCHEDULES: Registry[Callable[[TrainingSettings, int, int], Schedule]] = Registry(
    "training.schedule",
    paper=paper_schedule,
    inverse_sqrt=inverse_sqrt_schedule,
    linear=linear_schedule,
    cosine=cosine_schedule,
)
"""Functions with the arguments of `build_schedule`, by the name that `training.schedule` holds."""


def build_schedule(settings: TrainingSettings, d_model: int, max_steps: int) -> Schedule:
    """Return the schedule that `settings.schedule` names.

    Args:
        settings: the recipe's `training:`.
        d_model: width of the network.
        max_steps: the recipe's `trainer.max_steps`, the number of the run's last step; -1 if it is not known.

    Raises:
        ValueError: no schedule of that name is registered.
    """
    return SCHEDULES[settings.schedule](settings, d_model, max_steps)
