"""Triton kernels for everything in the loss that reads logits.

PyTorch's operations would read or write a chunk of logits about eight times, and those of R-Drop about twenty times.
The kernels read it twice and overwrite it with its gradient, so that a chunk of logits needs no second buffer.

The number of classes and the distance between rows are compile-time constants: only then does the compiler know that
rows begin at multiples of 16 bytes and that masks are the same for neighbors, and reads 16 bytes at a time. It compiles
the kernels once for a vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.loss import LossFunctions

_LOG2_E = tl.constexpr(1.4426950408889634)
_BLOCK = 4096
"""Logits of a row that a program processes at a time. With 8192 a thread may need 80 registers in place of 48."""


@triton.jit
def _load(row, columns, VOCABULARY_SIZE: tl.constexpr, STRIDE: tl.constexpr):
    """Load logits of a row in float32, and -inf past its classes.

    Padding up to the next row is read too, since masks that end within 16 bytes would make the compiler read numbers
    one by one.
    """
    x = tl.load(row + columns, mask=columns < STRIDE, other=float("-inf")).to(tl.float32)
    if VOCABULARY_SIZE < STRIDE:
        x = tl.where(columns < VOCABULARY_SIZE, x, float("-inf"))
    return x


@triton.jit
def _store(row, columns, gradient, STRIDE: tl.constexpr):
    """Overwrite logits of a row, and the padding up to the next row."""
    tl.store(row + columns, gradient.to(row.dtype.element_ty), mask=columns < STRIDE)


@triton.jit
def _row(
    logits, targets, largest_logits, target_logits, max_probability,
    epsilon,
    VOCABULARY_SIZE: tl.constexpr, STRIDE: tl.constexpr, HAS_GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * STRIDE
    columns = tl.arange(0, BLOCK)
    target = tl.load(targets + row)
    # The reductions below synchronize the program, so this is read before any thread overwrites it.
    target_logit = tl.load(logits + target).to(tl.float32)
    largest = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for first in range(0, VOCABULARY_SIZE, BLOCK):
        x = _load(logits, first + columns, VOCABULARY_SIZE, STRIDE)
        new_largest = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp2((largest - new_largest) * _LOG2_E) + tl.sum(tl.exp2((x - new_largest) * _LOG2_E), 0)
        largest = new_largest
    tl.store(largest_logits + row, largest)
    tl.store(target_logits + row, target_logit)
    tl.store(max_probability + row, 1.0 / total)
    if HAS_GRADIENT:
        for first in range(0, VOCABULARY_SIZE, BLOCK):
            x = _load(logits, first + columns, VOCABULARY_SIZE, STRIDE)
            gradient = tl.exp2((x - largest) * _LOG2_E) / total
            gradient = tl.where(first + columns == target, gradient + (epsilon - 1.0), gradient)
            _store(logits, first + columns, gradient, STRIDE)


@triton.jit
def _row_pair(
    logits, targets, largest_logits, target_logits, max_probability, divergences,
    epsilon, alpha,
    VOCABULARY_SIZE: tl.constexpr, STRIDE: tl.constexpr, HAS_GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first_row, second_row = 2 * row, 2 * row + 1
    logits += first_row * STRIDE
    others = logits + STRIDE
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
    for first in range(0, VOCABULARY_SIZE, BLOCK):
        x = _load(logits, first + columns, VOCABULARY_SIZE, STRIDE)
        y = _load(others, first + columns, VOCABULARY_SIZE, STRIDE)
        difference = tl.where(first + columns < VOCABULARY_SIZE, x - y, 0.0)
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
        for first in range(0, VOCABULARY_SIZE, BLOCK):
            x = _load(logits, first + columns, VOCABULARY_SIZE, STRIDE)
            y = _load(others, first + columns, VOCABULARY_SIZE, STRIDE)
            difference = tl.where(first + columns < VOCABULARY_SIZE, x - y, 0.0)
            p = tl.exp2((x - largest_x) * _LOG2_E) / total_x
            q = tl.exp2((y - largest_y) * _LOG2_E) / total_y
            gradient_x = p + 0.5 * alpha * (p * (difference - mean_x) + p - q)
            gradient_y = q + 0.5 * alpha * (q * (mean_y - difference) + q - p)
            one_hot = tl.where(first + columns == target, epsilon - 1.0, 0.0)
            _store(logits, first + columns, gradient_x + one_hot, STRIDE)
            _store(others, first + columns, gradient_y + one_hot, STRIDE)


def read_logits(
    logits: Tensor, target: Tensor, sum_dtype: torch.dtype, epsilon: float, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Do what `model.loss.read_logits` does; `logits` are overwritten by their gradient.

    They must be contiguous, or the first columns of a contiguous tensor, whose other columns are not read as logits and
    may be overwritten by zeros. `sum_dtype` must be float32, and so are the first three results.
    """
    rows, vocabulary_size = logits.shape
    largest, target_logits, max_probability = logits.new_empty(3, rows, 1, dtype=sum_dtype)
    block = min(_BLOCK, triton.next_power_of_2(vocabulary_size))
    _row[(rows,)](
        *(logits, target, largest, target_logits, max_probability, epsilon),
        VOCABULARY_SIZE=vocabulary_size,
        STRIDE=logits.stride(0),
        HAS_GRADIENT=with_gradient,
        BLOCK=block,
        num_warps=8,
    )
    return largest, target_logits, max_probability, logits if with_gradient else None


def read_logit_pairs(
    logits: Tensor, target: Tensor, sum_dtype: torch.dtype, epsilon: float, with_gradient: bool, alpha: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Do what `model.loss.read_logit_pairs` does; for the rest, see `read_logits`.

    `sum_dtype` must be float32, and so are the first four results.
    """
    rows, vocabulary_size = logits.shape
    largest, target_logits, max_probability = logits.new_empty(3, rows, 1, dtype=sum_dtype)
    divergences = logits.new_empty(rows // 2, 1, dtype=sum_dtype)
    # A program holds parts of two rows at a time.
    block = min(_BLOCK // 2, triton.next_power_of_2(vocabulary_size))
    _row_pair[(rows // 2,)](
        *(logits, target, largest, target_logits, max_probability, divergences, epsilon, alpha),
        VOCABULARY_SIZE=vocabulary_size,
        STRIDE=logits.stride(0),
        HAS_GRADIENT=with_gradient,
        BLOCK=block,
        num_warps=8,
    )
    return largest, target_logits, max_probability, divergences, logits if with_gradient else None


TRITON_LOSS = LossFunctions("Triton", read_logits, read_logit_pairs, in_place=True, allows_padding=True)
