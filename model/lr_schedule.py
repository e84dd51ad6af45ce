"""Learning-rate schedules. The recipe's `training.schedule` names one; "paper" is that of section 5.3."""

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


SCHEDULES: Registry[Callable[[TrainingSettings, int, int], Schedule]] = Registry(
    "training.schedule", paper=paper_schedule
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
