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
    logits, targets, largest_logits, target_logits, most_probable,
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
        for first in range(0, vocabulary_size, BLOCK):
            mask = first + columns < vocabulary_size
            x = tl.load(logits + first + columns, mask=mask, other=float("-inf")).to(tl.float32)
            gradient = tl.exp2((x - largest) * _LOG2_E) / total
            gradient = tl.where(first + columns == target, gradient + (epsilon - 1.0), gradient)
            tl.store(logits + first + columns, gradient.to(logits.dtype.element_ty), mask=mask)


def over_classes(
    logits: Tensor, target: Tensor, sum_dtype: torch.dtype, epsilon: float, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Do what `model.loss._over_classes` does; `logits`, which must be contiguous, are overwritten by their gradient.

    `sum_dtype` must be float32, and so are the first three results.
    """
    rows, vocabulary_size = logits.shape
    largest, target_logits, most_probable = logits.new_empty(3, rows, 1, dtype=sum_dtype)
    block = min(_BLOCK, triton.next_power_of_2(vocabulary_size))
    _row[(rows,)](
        *(logits, target, largest, target_logits, most_probable, vocabulary_size, epsilon),
        HAS_GRADIENT=with_gradient,
        BLOCK=block,
        num_warps=8,
    )
    return largest, target_logits, most_probable, logits if with_gradient else None
