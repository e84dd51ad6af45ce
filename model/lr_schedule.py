"""The paper's learning-rate schedule (section 5.3, equation 3)."""

from model.settings import TrainingSettings


def noam_learning_rate(step: int, d_model: int, settings: TrainingSettings) -> float:
    """learning_rate_factor * d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5).

    Rises linearly for `warmup_steps` steps, then falls with the square root of the step. What it is a function of
    stays the same when a run goes on; `trainer.max_steps` may change.

    Args:
        step: the optimizer step about to be taken, counted from 1.
        d_model: the network's width.
        settings: the recipe's.

    Raises ValueError for a step below 1.
    """
    if step < 1:
        raise ValueError(f"step {step} must be 1 or more")
    return settings.learning_rate_factor * d_model**-0.5 * min(step**-0.5, step * settings.warmup_steps**-1.5)
