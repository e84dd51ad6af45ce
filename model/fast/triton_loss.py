"""Triton kernels for everything in the loss that reads logits.

PyTorch's operations would read or write a chunk of logits about eight times, and those of R-Drop about twenty times.
The kernels read it twice and overwrite it with its gradient, so that a chunk of logits needs no second buffer.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.loss import LossFunctions

_LOG2_E = tl.constexpr(1.4426950408889634)
_BLOCK = 8192
"""Logits of a row that a program processes at a time."""


@triton.jit
def _row(
    logits, targets, largest_logits, target_logits, max_probability,
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
    tl.store(max_probability + row, 1.0 / total)
    if HAS_GRADIENT:
        for first in range(0, vocabulary_size, BLOCK):
            mask = first + columns < vocabulary_size
            x = tl.load(logits + first + columns, mask=mask, other=float("-inf")).to(tl.float32)
            gradient = tl.exp2((x - largest) * _LOG2_E) / total
            gradient = tl.where(first + columns == target, gradient + (epsilon - 1.0), gradient)
            tl.store(logits + first + columns, gradient.to(logits.dtype.element_ty), mask=mask)


@triton.jit
def _row_pair(
    logits, targets, largest_logits, target_logits, max_probability, divergences,
    vocabulary_size, epsilon, alpha,
    HAS_GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first_row, second_row = 2 * row, 2 * row + 1
    logits += first_row * vocabulary_size
    others = logits + vocabulary_size
    columns = tl.arange(0, BLOCK)
    target = tl.load(targets + first_row)
    # The reductions below synchronize the program, so these are read before any thread overwrites them.
    target_x = tl.load(logits + target).to(tl.float32)
    target_y = tl.load(others + target).to(tl.float32)
    largest_x = tl.full([], float("-inf"), tl.float32)
    largest_y = tl.full([], float("-inf"), tl.float32)
    total_x = tl.full([], 0.0, tl.float32)
    total_y = tl.full([], 0.0, tl.float32)
    # Sums of the difference of the logits, weighted by the exponentials of either side.
    by_x = tl.full([], 0.0, tl.float32)
    by_y = tl.full([], 0.0, tl.float32)
    for first in range(0, vocabulary_size, BLOCK):
        mask = first + columns < vocabulary_size
        x = tl.load(logits + first + columns, mask=mask, other=float("-inf")).to(tl.float32)
        y = tl.load(others + first + columns, mask=mask, other=float("-inf")).to(tl.float32)
        difference = tl.where(mask, x - y, 0.0)
        new_x = tl.maximum(largest_x, tl.max(x, 0))
        new_y = tl.maximum(largest_y, tl.max(y, 0))
        shrink_x, shrink_y = tl.exp2((largest_x - new_x) * _LOG2_E), tl.exp2((largest_y - new_y) * _LOG2_E)
        weight_x, weight_y = tl.exp2((x - new_x) * _LOG2_E), tl.exp2((y - new_y) * _LOG2_E)
        total_x = total_x * shrink_x + tl.sum(weight_x, 0)
        total_y = total_y * shrink_y + tl.sum(weight_y, 0)
        by_x = by_x * shrink_x + tl.sum(weight_x * difference, 0)
        by_y = by_y * shrink_y + tl.sum(weight_y * difference, 0)
        largest_x, largest_y = new_x, new_y
    # log(p / q) is the difference of the logits minus a number for each row, which cancels in the sum of both
    # divergences, and in log(p / q) - KL(p || q).
    mean_x = by_x / total_x
    mean_y = by_y / total_y
    tl.store(largest_logits + first_row, largest_x)
    tl.store(largest_logits + second_row, largest_y)
    tl.store(target_logits + first_row, target_x)
    tl.store(target_logits + second_row, target_y)
    tl.store(max_probability + first_row, 1.0 / total_x)
    tl.store(max_probability + second_row, 1.0 / total_y)
    tl.store(divergences + row, 0.5 * (mean_x - mean_y))
    if HAS_GRADIENT:
        for first in range(0, vocabulary_size, BLOCK):
            mask = first + columns < vocabulary_size
            x = tl.load(logits + first + columns, mask=mask, other=0.0).to(tl.float32)
            y = tl.load(others + first + columns, mask=mask, other=0.0).to(tl.float32)
            p = tl.exp2((x - largest_x) * _LOG2_E) / total_x
            q = tl.exp2((y - largest_y) * _LOG2_E) / total_y
            gradient_x = p + 0.5 * alpha * (p * (x - y - mean_x) + p - q)
            gradient_y = q + 0.5 * alpha * (q * (y - x + mean_y) + q - p)
            one_hot = tl.where(first + columns == target, epsilon - 1.0, 0.0)
            tl.store(logits + first + columns, (gradient_x + one_hot).to(logits.dtype.element_ty), mask=mask)
            tl.store(others + first + columns, (gradient_y + one_hot).to(logits.dtype.element_ty), mask=mask)


def read_logits(
    logits: Tensor, target: Tensor, sum_dtype: torch.dtype, epsilon: float, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Do what `model.loss.read_logits` does; `logits`, which must be contiguous, are overwritten by their gradient.

    `sum_dtype` must be float32, and so are the first three results.
    """
    rows, vocabulary_size = logits.shape
    largest, target_logits, max_probability = logits.new_empty(3, rows, 1, dtype=sum_dtype)
    block = min(_BLOCK, triton.next_power_of_2(vocabulary_size))
    _row[(rows,)](
        *(logits, target, largest, target_logits, max_probability, vocabulary_size, epsilon),
        HAS_GRADIENT=with_gradient,
        BLOCK=block,
        num_warps=8,
    )
    return largest, target_logits, max_probability, logits if with_gradient else None


def read_logit_pairs(
    logits: Tensor, target: Tensor, sum_dtype: torch.dtype, epsilon: float, with_gradient: bool, alpha: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Do what `model.loss.read_logit_pairs` does; `logits`, which must be contiguous, are overwritten.

    `sum_dtype` must be float32, and so are the first four results.
    """
    rows, vocabulary_size = logits.shape
    largest, target_logits, max_probability = logits.new_empty(3, rows, 1, dtype=sum_dtype)
    divergences = logits.new_empty(rows // 2, 1, dtype=sum_dtype)
    # A program holds parts of two rows at a time.
    block = min(_BLOCK // 2, triton.next_power_of_2(vocabulary_size))
    _row_pair[(rows // 2,)](
        *(logits, target, largest, target_logits, max_probability, divergences, vocabulary_size, epsilon, alpha),
        HAS_GRADIENT=with_gradient,
        BLOCK=block,
        num_warps=8,
    )
    return largest, target_logits, max_probability, divergences, logits if with_gradient else None


TRITON_LOSS = LossFunctions("Triton", read_logits, read_logit_pairs, in_place=True)
