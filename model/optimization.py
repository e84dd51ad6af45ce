"""Optimizers and learning-rate schedules (section 5.3), by the names in the recipe's `training:`; loss scaling.

The schedule "paper" and the optimizer "adam" are those of section 5.3. The other schedules rise linearly from 0 to
`training.peak_learning_rate` within `training.warmup_steps`, and then decay.
"""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from data_module.registry import Registry
from model.beyond.muon import Muon
from model.settings import TrainingSettings
from model.torch_private import set_gradient_scaling, skips_non_finite_steps

_INITIAL_SCALE = 2.0**16
_GROWTH_INTERVAL = 2000
Schedule = Callable[[int], float]
"""Maps the number of a step, from 1, to its learning rate. Raises ValueError for 0 or less."""


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
    """Return a schedule of the paper's shape with a given peak: after the warm-up, peak * sqrt(warmup_steps / step).

    Neither `d_model` nor `max_steps` has an effect. fairseq's schedule of this name starts at 1e-7 instead of 0.
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
    """Return a schedule that rises linearly to the peak and then, at each step, is the peak times `decay(step)`."""
    assert settings.peak_learning_rate is not None
    peak = settings.learning_rate_factor * settings.peak_learning_rate

    def learning_rate(step: int) -> float:
        if step < 1:
            raise ValueError(f"step {step} must be 1 or more")
        return peak * (step / settings.warmup_steps if step <= settings.warmup_steps else decay(step))

    return learning_rate


def _progress(settings: TrainingSettings, step: int, max_steps: int) -> float:
    """Return the share of the steps after the warm-up before `step`, at most 1; 0 if `max_steps` is below 1."""
    if max_steps < 1:
        return 0.0
    return min(1.0, (step - settings.warmup_steps) / (max_steps + 1 - settings.warmup_steps))


SCHEDULES: Registry[Callable[[TrainingSettings, int, int], Schedule]] = Registry(
    "training.schedule",
    paper=paper_schedule,
    inverse_sqrt=inverse_sqrt_schedule,
    linear=linear_schedule,
    cosine=cosine_schedule,
)
"""Functions with the arguments of `build_schedule`, by the name that `training.schedule` holds."""


def build_schedule(settings: TrainingSettings, d_model: int, max_steps: int) -> Schedule:
    """Return the schedule that `settings.schedule` names; `max_steps` is -1 if the run's last step is not known.

    Raises ValueError if no schedule of that name is registered.
    """
    return SCHEDULES[settings.schedule](settings, d_model, max_steps)


def adam(parameters: Iterable[nn.Parameter], settings: TrainingSettings) -> Optimizer:
    """Return Adam with the recipe's betas, epsilon and decoupled weight decay.

    It sets no learning rate: the training step sets the schedule's rate before each step.

    With weight decay there are two groups of parameters. Matrices decay, the embeddings too, since they are the output
    projection. Vectors do not: biases do not overfit, and a decay would pull the gains of norms away from the identity.
    fairseq decays all parameters.
    """
    betas, epsilon = (settings.adam_beta1, settings.adam_beta2), settings.adam_epsilon
    if settings.weight_decay == 0.0:
        return Adam(parameters, lr=0.0, betas=betas, eps=epsilon, fused=True)
    parameters = list(parameters)
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    groups: list[dict[str, object]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return AdamW(groups, lr=0.0, betas=betas, eps=epsilon, weight_decay=settings.weight_decay, fused=True)


def muon(parameters: Iterable[nn.Parameter], settings: TrainingSettings) -> Optimizer:
    """Return Muon for the projections of attention and feed-forward networks, and `adam` for all other parameters.

    Raises ValueError if no parameter is such a projection.
    """
    parameters = list(parameters)
    projections = [parameter for parameter in parameters if hasattr(parameter, "projections")]
    if not projections:
        raise ValueError("it finds no projection in this network; choose adam")
    others = adam([parameter for parameter in parameters if not hasattr(parameter, "projections")], settings)
    momentum = 0.95 if settings.muon_momentum is None else settings.muon_momentum
    return Muon(projections, others, momentum, settings.weight_decay)


OPTIMIZERS: Registry[Callable[[Iterable[nn.Parameter], TrainingSettings], Optimizer]] = Registry(
    "training.optimizer", adam=adam, muon=muon
)
"""Functions with the arguments of `build_optimizer`, by the name that `training.optimizer` holds."""


def build_optimizer(parameters: Iterable[nn.Parameter], settings: TrainingSettings) -> Optimizer:
    """Return the optimizer that `settings.optimizer` names, over all parameters.

    Its own learning rate has no effect, since the training step sets the schedule's rate before each step.
    Raises ValueError if no optimizer of that name is registered.
    """
    return OPTIMIZERS[settings.optimizer](parameters, settings)


def take_step(optimizer: Optimizer, step: Callable[[], object], skip: Tensor, loss_scale: Tensor | None) -> None:
    """Take an optimizer step with gradients that are multiplied by `loss_scale`; change nothing if `skip` is 1.

    PyTorch's fused optimizers read both tensors on the device, so that the host does not wait for it. For any other
    optimizer, the host waits for `skip`. It then divides the gradients or, to skip the step, removes them, since
    optimizers ignore parameters without a gradient.

    Args:
        optimizer: its parameters have gradients.
        step: takes the optimizer's step.
        skip: 1 if a gradient is not finite, else 0; a float32 scalar on the gradients' device.
        loss_scale: the factor that the loss was multiplied by, a scalar; None for 1.
    """
    if skips_non_finite_steps(optimizer):
        set_gradient_scaling(optimizer, loss_scale, skip)
    elif bool(skip):
        optimizer.zero_grad()
    elif loss_scale is not None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(loss_scale)
    step()


class LossScaler:
    """A scale of the loss that is halved after a non-finite gradient and doubled after 2,000 finite ones.

    The rule is that of `torch.amp.GradScaler`. Unlike GradScaler, this class never synchronizes the host with a GPU,
    and it leaves the gradients scaled: the optimizer divides by the scale, after clipping.
    """

    def __init__(self) -> None:
        self.scale = torch.tensor(_INITIAL_SCALE)
        self._finite = torch.zeros(())
        """Number of steps since the scale changed."""

    def to(self, device: torch.device) -> None:
        """Move the state to a device."""
        self.scale, self._finite = self.scale.to(device), self._finite.to(device)

    def update(self, skipped: Tensor) -> None:
        """Update the scale in place after a step; `skipped` is 1 if its gradient was not finite, else 0."""
        finite = (self._finite + 1.0) * (1.0 - skipped)
        grows = (finite >= _GROWTH_INTERVAL).float()
        self.scale.mul_((1.0 - 0.5 * skipped) * (1.0 + grows))
        self._finite.copy_(finite * (1.0 - grows))

    def state(self) -> list[float]:
        """Return the state as plain values, for a checkpoint."""
        return [self.scale.item(), self._finite.item()]

    def load_state(self, state: list[float]) -> None:
        """Restore what `state` returned."""
        self.scale.fill_(state[0])
        self._finite.fill_(state[1])
