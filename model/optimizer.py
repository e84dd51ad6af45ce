"""Optimizers. The recipe's `training.optimizer` names one; "adam" is that of section 5.3."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from model.registry import Registry
from model.settings import TrainingSettings
from model.torch_private import set_gradient_scaling, skips_non_finite_steps


def adam(parameters: Iterable[nn.Parameter], settings: TrainingSettings) -> Optimizer:
    """Return Adam with the recipe's betas, epsilon and decoupled weight decay.

    With weight decay there are two groups of parameters. Matrices decay, the embeddings too, since they are the output
    projection. Vectors do not: biases do not overfit, and a decay would pull the gains of norms away from the identity.
    fairseq decays all parameters.
    """
    options: dict[str, Any] = {
        "lr": 0.0,
        "betas": (settings.adam_beta1, settings.adam_beta2),
        "eps": settings.adam_epsilon,
        "fused": True,
    }
    if settings.weight_decay == 0.0:
        return Adam(parameters, **options)
    parameters = list(parameters)
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return AdamW(groups, weight_decay=settings.weight_decay, **options)


OPTIMIZERS: Registry[Callable[[Iterable[nn.Parameter], TrainingSettings], Optimizer]] = Registry(
    "training.optimizer", adam=adam
)
"""Functions with the arguments of `build_optimizer`, by the name that `training.optimizer` holds."""


def build_optimizer(parameters: Iterable[nn.Parameter], settings: TrainingSettings) -> Optimizer:
    """Return the optimizer that `settings.optimizer` names, over all parameters.

    Its learning rate has no effect: the schedule sets the rate before each step.

    Raises:
        ValueError: no optimizer of that name is registered.
    """
    return OPTIMIZERS[settings.optimizer](parameters, settings)


def prepare_step(optimizer: Optimizer, skip: Tensor, scale: Tensor | None) -> None:
    """Make the optimizer's next step divide gradients by `scale`, and change nothing if `skip` is 1.

    A fused optimizer of PyTorch does both on its own device. For any other one the gradients are divided here, and are
    removed if the step is to be skipped, since optimizers ignore parameters without a gradient. To know that, the host
    waits for the device.

    Args:
        optimizer: its parameters have gradients.
        skip: 1 if a gradient is not finite, else 0; a scalar on the gradients' device.
        scale: the factor that the loss was multiplied by, a scalar; None for 1.
    """
    if skips_non_finite_steps(optimizer):
        set_gradient_scaling(optimizer, scale, skip)
        return
    if bool(skip):
        optimizer.zero_grad()
    elif scale is not None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(scale)
