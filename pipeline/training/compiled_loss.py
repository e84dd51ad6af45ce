"""Loads the compiled loss, and compares it with PyTorch's operators before it is kept."""

import math
from typing import Any

import torch

from model.fast.compiled_loss import DTYPES, SOURCES, CompiledLoss
from model.loss import label_smoothed_loss
from pipeline.runtime.compiled_code import Program, load_program
from pipeline.runtime.console import say

_CLASSES, _WIDTH, _TOKENS = 77, 20, 21
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Largest difference, relative to the norm of what PyTorch's operators compute."""


def load_compiled_loss() -> CompiledLoss | None:
    """Return the compiled loss, and compile it first if that has not been done.

    Where that is not possible, say why in one line and return None: PyTorch's operators compute the same.
    """
    try:
        return load_program(Program("loss", SOURCES, CompiledLoss, agrees))
    except OSError as error:
        say(f"training without the compiled loss, which is slower: {error}")
        return None


def agrees(loss: CompiledLoss) -> bool:
    """Return whether sums and gradients are those of PyTorch's operators, to rounding."""
    cases = [(dtype, alpha) for dtype in DTYPES for alpha in (0.0, 3.0)]
    return all(_agrees_on(loss, *case) and _keeps_what_is_not_finite(loss, *case) for case in cases)


def _agrees_on(loss: CompiledLoss, dtype: torch.dtype, alpha: float) -> bool:
    # A number of classes that is no multiple of a vector, and distributions that are far from uniform.
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(2 if alpha else 1, _TOKENS, _WIDTH, generator=generator)
    weight = torch.randn(_CLASSES, _WIDTH, generator=generator) / 2
    targets = torch.randint(_CLASSES, (_TOKENS,), generator=generator)

    def results(kernels: Any) -> list[torch.Tensor]:
        inputs = [(states if alpha else states[0]).clone().requires_grad_(), weight.clone().requires_grad_()]
        with torch.enable_grad(), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            sums = label_smoothed_loss(inputs[0], inputs[1], targets, 0.1, -1, kernels=kernels, r_drop_alpha=alpha)
        return [*sums, *torch.autograd.grad(sums.smoothed, inputs)]

    pairs = zip(results(loss), results("pytorch"), strict=True)
    return all(bool((own - other).norm() <= _TOLERANCE[dtype] * other.norm()) for own, other in pairs)


def _keeps_what_is_not_finite(loss: CompiledLoss, dtype: torch.dtype, alpha: float) -> bool:
    """Return whether a logit that is not finite reaches the gradient. Compilers can be told that there is none."""
    logits = torch.zeros(4, _CLASSES, dtype=dtype)
    logits[0, 1], logits[2, -1] = math.nan, math.inf
    arguments = (logits, torch.zeros(4, 1, dtype=torch.int64), torch.float32, 0.1, True)
    gradient = (loss.over_class_pairs(*arguments, alpha) if alpha else loss.over_classes(*arguments))[-1]
    return gradient is not None and not gradient[::2].isfinite().any()
