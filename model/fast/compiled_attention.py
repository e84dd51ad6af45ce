"""Attention over sentences that lie end to end, on a CPU in float32, by one compiled program, `attention.cpp`.

The caller decides which compiled program may be loaded: see `pipeline/runtime/compiled_code.py`.
"""

import ctypes
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.fast.compiled_loss import load_function
from model.packed_attention import Attention, Segments, block_attention, block_bias

SOURCES = tuple(Path(__file__).parent / name for name in ("attention.cpp", "vectors.h"))
"""The program and its header."""
HEAD_MULTIPLE = 16
"""Sizes of heads have to be multiples of this, the number of floats in the widest vectors."""
_FLOAT_BYTES = torch.float32.itemsize


class _Matrix(ctypes.Structure):
    _fields_ = ("at", ctypes.c_void_p), ("row", ctypes.c_int64)


class _Request(ctypes.Structure):
    _fields_ = (
        *((name, _Matrix) for name in ("queries", "keys", "values", "result", "normalizers", "gradient")),
        *((f"grad_{name}", _Matrix) for name in ("queries", "keys", "values")),
        *((name, ctypes.c_void_p) for name in ("query_offsets", "key_offsets")),
        *((name, ctypes.c_int64) for name in ("num_segments", "num_heads", "key_size", "value_size", "longest")),
        *((name, ctypes.c_int64) for name in ("is_causal", "is_backward", "num_threads")),
    )


class CompiledAttention:
    """The compiled program. It is pickled as its path."""

    def __init__(self, path: Path) -> None:
        """Load a compiled program, as `load_function` does."""
        self._path, self._compute = path, load_function(path, "attention", _Request)

    def __reduce__(self) -> tuple[type["CompiledAttention"], tuple[Path]]:
        return CompiledAttention, (self._path,)

    def attention(self) -> Attention:
        """Return the program for `packed_segments`."""
        return Attention("C++", self.attend, constant_rows=False)

    def attend(
        self, inputs: list[Tensor], segments: Segments, dropout: Tensor | None, num_heads: int, d_k: int
    ) -> Tensor:
        """Do what `model.packed_attention.flash_attention` does, for float32 and sizes of heads that it takes.

        The GIL is released.

        Raises:
            MemoryError: there is no memory for the weights of a few queries.
        """
        assert dropout is None
        result: Tensor = _Attend.apply(self, segments, num_heads, d_k, *inputs)
        return result

    def run(
        self,
        inputs: list[Tensor],
        results: tuple[Tensor, Tensor],
        gradients: tuple[Tensor, list[Tensor]] | None,
        segments: Segments,
        num_heads: int,
        d_k: int,
    ) -> None:
        """Write the result [R, H * V] and normalizers [R, H], or with `gradients` those of the inputs from them.

        Args:
            inputs: see `flash_attention`.
            results: the result and the logarithms of the normalizers.
            gradients: the gradient of the result, and those of the inputs.
            segments: which tokens attend to which.
            num_heads: H.
            d_k: K.
        """
        upstream, written = gradients or (results[0], inputs)
        tensors = [*inputs, *results, upstream, *written]
        offsets = segments.query_offsets, segments.key_offsets
        assert all(x.dtype == torch.float32 and x.is_contiguous() and x.device.type == "cpu" for x in tensors)
        assert all(x.dtype == torch.int32 and x.is_contiguous() for x in offsets)
        d_v = results[0].size(1) // num_heads
        assert d_k % HEAD_MULTIPLE == d_v % HEAD_MULTIPLE == 0
        request = _Request(
            *_matrices(inputs, num_heads * d_k),
            *(_Matrix(x.data_ptr(), x.size(1)) for x in (*results, upstream)),
            *_matrices(written, num_heads * d_k),
            *(x.data_ptr() for x in offsets),
            len(offsets[0]) - 1,
            num_heads,
            d_k,
            d_v,
            int(offsets[1].diff().max()),
            segments.is_causal,
            gradients is not None,
            torch.get_num_threads(),
        )
        if self._compute(ctypes.byref(request)):
            raise MemoryError("not enough memory for attention")


def _matrices(tensors: list[Tensor], size: int) -> list[_Matrix]:
    """Return queries, keys and values, or their gradients, where they are in the tensors; `size` is H * K."""
    places = [(tensors[0], 0), (tensors[0], size), (tensors[0], 2 * size)]
    if len(tensors) == 2:
        places[1:] = [(tensors[1], 0), (tensors[1], size)]
    return [_Matrix(x.data_ptr() + first * _FLOAT_BYTES, x.size(1)) for x, first in places]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, program: CompiledAttention, segments: Segments, num_heads: int, d_k: int, *inputs: Tensor
    ) -> Tensor:
        width = inputs[0].size(1) - 2 * num_heads * d_k if len(inputs) == 1 else inputs[1].size(1) - num_heads * d_k
        result = inputs[0].new_empty(inputs[0].size(0), width)
        normalizers = inputs[0].new_empty(inputs[0].size(0), num_heads)
        program.run(list(inputs), (result, normalizers), None, segments, num_heads, d_k)
        result[segments.query_offsets[-1] :] = 0.0
        ctx.save_for_backward(*inputs, result, normalizers)
        ctx.arguments = program, segments, num_heads, d_k
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        program, segments, num_heads, d_k = ctx.arguments
        *inputs, result, normalizers = ctx.saved_tensors
        written = [torch.empty_like(x) for x in inputs]
        upstream = gradients[0].contiguous()
        program.run(inputs, (result, normalizers), (upstream, written), segments, num_heads, d_k)
        written[0][segments.query_offsets[-1] :] = 0.0
        written[-1][segments.key_offsets[-1] :] = 0.0
        return None, None, None, None, *written


def agrees(program: CompiledAttention) -> bool:
    """Return whether results and gradients are those of PyTorch's operators in blocks, to rounding."""
    return all(_agrees_on(program, is_causal) for is_causal in (False, True))


def _agrees_on(program: CompiledAttention, is_causal: bool) -> bool:
    # Lengths beside those of vectors and of tiles.
    lengths, num_heads, size = (1, 7, 8, 17, 40, 55), 2, HEAD_MULTIPLE
    offsets = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    generator = torch.Generator().manual_seed(1)
    projected = torch.randn(sum(lengths), 3 * num_heads * size, generator=generator)
    ids = torch.repeat_interleave(torch.tensor(lengths)).unsqueeze(0)
    bias = block_bias(ids, ids, is_causal, torch.float32)
    longest = max(lengths)
    segments = Segments(offsets, offsets, longest, is_causal, None, None, program.attend, [])
    wrong = projected.clone()
    wrong[0, 0] = math.nan
    if program.attend([wrong], segments, None, num_heads, size)[0, :size].isfinite().any():
        return False  # -ffast-math lets a compiler assume that there is no NaN; refuse such a build.
    results = []
    for attend in (
        lambda x: program.attend([x], segments, None, num_heads, size),
        lambda x: block_attention(x, None, [bias], None, num_heads, size)[0],
    ):
        leaf = projected.clone().requires_grad_()
        with torch.enable_grad():
            result = attend(leaf)
            results.append([result, *torch.autograd.grad(result, leaf, result.detach().sin())])
    return all(bool((own - other).norm() <= 1e-5 * other.norm()) for own, other in zip(*results, strict=True))
