"""A Triton kernel for everything in the loss that reads logits.

PyTorch's operations would read or write a chunk of logits about eight times. The kernel reads it twice and overwrites
it with its gradient, so that a chunk of logits needs no second buffer.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2_E = tl.constexpr(1.4426950408889634)
_BLOCK = 8192
"""Logits of a row that a program processes at a time."""


@triton.jit
def _row(
    logits, targets, scale, largest_logits, target_logits, most_probable,
    vocabulary_size, epsilon,
    HAS_GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocabulary_size
    columns = tl.arange(0, BLOCK)
    target = tl.load(targets + row)
    # The reductions below synchronize the program, so this is read before any thread overwrites it.
    target_logit = tl.load(logits + target).to(tl.float32)
    largest = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for first in range(0, vocabulary_size, BLOCK):
        x = tl.load(logits + first + columns, mask=first + columns < vocabulary_size, other=float("-inf"))
        x = x.to(tl.float32)
        new_largest = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp2((largest - new_largest) * _LOG2_E) + tl.sum(tl.exp2((x - new_largest) * _LOG2_E), 0)
        largest = new_largest
    tl.store(largest_logits + row, largest)
    tl.store(target_logits + row, target_logit)
    tl.store(most_probable + row, 1.0 / total)
    if HAS_GRADIENT:
        factor = tl.load(scale)
        for first in range(0, vocabulary_size, BLOCK):
            mask = first + columns < vocabulary_size
            x = tl.load(logits + first + columns, mask=mask, other=float("-inf")).to(tl.float32)
            gradient = tl.exp2((x - largest) * _LOG2_E) / total
            gradient = tl.where(first + columns == target, gradient + (epsilon - 1.0), gradient) * factor
            tl.store(logits + first + columns, gradient.to(logits.dtype.element_ty), mask=mask)


def over_classes(
    logits: Tensor, target: Tensor, epsilon: float, scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute what `model.loss` needs of a chunk of logits; see `_over_classes` there.

    Args:
        logits: [rows, V], contiguous. Overwritten by their gradient if `scale` is not None.
        target: int64 [rows, 1].
        epsilon: the label smoothing.
        scale: float32 scalar by which the gradient is multiplied; None for no gradient.

    Returns:
        float32 [rows, 1]: the largest logit, the target's logit and the probability of the most probable class; and
        the gradient, which is `logits`, or None.
    """
    rows, vocabulary_size = logits.shape
    largest, target_logits, most_probable = logits.new_empty(3, rows, 1, dtype=torch.float32)
    tensors = (logits, target, largest if scale is None else scale, largest, target_logits, most_probable)
    block = min(_BLOCK, triton.next_power_of_2(vocabulary_size))
    _row[(rows,)](*tensors, vocabulary_size, epsilon, HAS_GRADIENT=scale is not None, BLOCK=block, num_warps=8)
    return largest, target_logits, most_probable, None if scale is None else logits
