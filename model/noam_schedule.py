"""The paper's learning-rate schedule (section 5.3, equation 3)."""


def noam_learning_rate(step: int, d_model: int, warmup_steps: int, factor: float = 1.0) -> float:
    """factor * d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5).

    Rises linearly for `warmup_steps` steps, then falls with the square root of the step.

    Args:
        step: the optimizer step about to be taken, counted from 1.
        d_model: the network's width.
        warmup_steps: 4,000 in the paper.
        factor: tensor2tensor's `learning_rate_factor`; 1 in the paper.

    Raises ValueError for a step or warm-up below 1.
    """
    if step < 1 or warmup_steps < 1:
        raise ValueError(f"step {step} and warmup_steps {warmup_steps} must be 1 or more")
    return factor * d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5)
