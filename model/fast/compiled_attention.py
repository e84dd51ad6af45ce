"""Attention over packed rows on a CPU, in float32 and bfloat16, by one compiled program, `attention.cpp`."""

import ctypes
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.attention import attention
from model.packed_attention import RowAttention, RowSentences, split_inputs

SOURCES = tuple(Path(__file__).parent / name for name in ("attention.cpp", "vectors.h"))
"""The program and its header."""
DTYPES = (torch.float32, torch.bfloat16)
"""Types of queries, keys, values and results."""
HEAD_MULTIPLE = 16
"""Sizes of heads have to be multiples of this, the number of floats in the widest vectors."""
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Largest difference that `agrees` accepts, relative to the norm of what PyTorch's operators compute."""


class _Matrix(ctypes.Structure):
    _fields_ = ("at", ctypes.c_void_p), ("row", ctypes.c_int64)


class _Request(ctypes.Structure):
    _fields_ = (
        *((name, _Matrix) for name in ("queries", "keys", "values", "result", "gradient")),
        *((f"grad_{name}", _Matrix) for name in ("queries", "keys", "values")),
        ("normalizers", _Matrix),
        *((name, ctypes.c_void_p) for name in ("query_offsets", "key_offsets")),
        *((name, ctypes.c_int64) for name in ("num_sentences", "num_heads", "key_size", "value_size", "longest")),
        *((name, ctypes.c_int64) for name in ("is_causal", "is_backward", "is_bfloat16", "num_threads")),
    )


def load_function(path: Path) -> Callable[[object], int]:
    """Load the compiled program and return its function, which takes a pointer to a request and returns 0 on success.

    A program runs with this process's rights: see `pipeline/runtime/compiled_code.py`.

    Raises OSError if the file is no such program.
    """
    try:
        function = ctypes.CDLL(str(path)).compute_attention
    except AttributeError as error:
        raise OSError(f"{path} is no compiled attention: {error}") from None
    function.argtypes, function.restype = [ctypes.POINTER(_Request)], ctypes.c_int64
    return function


class CompiledAttention:
    """The compiled program. It is pickled as its path."""

    def __init__(self, path: Path) -> None:
        """Load a compiled program, as `load_function` does."""
        self._path, self._compute = path, load_function(path)

    def __reduce__(self) -> tuple[type["CompiledAttention"], tuple[Path]]:
        return CompiledAttention, (self._path,)

    def attention(self) -> RowAttention:
        """Return the program as an implementation for `packed_sentences`."""
        return RowAttention("C++", self.attend, constant_rows=False)

    def attend(self, inputs: list[Tensor], sentences: RowSentences, num_heads: int, d_k: int, dropout: float) -> Tensor:
        """Do what `model.packed_attention.flash_attention` does, for types and sizes of heads that the program takes.

        The GIL is released.

        Raises MemoryError if there is no memory for one head of the longest sentence.
        """
        assert not dropout
        result: Tensor = _Attend.apply(self, sentences, num_heads, d_k, *inputs)
        return result

    def run(
        self,
        inputs: list[Tensor],
        result: Tensor,
        normalizers: Tensor,
        written: list[Tensor] | None,
        sentences: RowSentences,
        num_heads: int,
        d_k: int,
    ) -> None:
        """Compute the result and the normalizers or, if `written` is given, the gradients of the inputs.

        Args:
            inputs: see `flash_attention`.
            result: [R, H * V], which is written; for gradients, the gradient of the result, which is read.
            normalizers: float32 [R, H], the logarithms of the normalizers of softmax; read for gradients.
            written: the gradients of the inputs; None to compute the result.
            sentences: which tokens attend to which.
            num_heads: H.
            d_k: K.
        """
        gradients = inputs if written is None else written
        offsets = sentences.query_offsets, sentences.key_offsets
        assert inputs[0].dtype in DTYPES
        for x in (*inputs, result, normalizers, *gradients, *offsets):
            assert x.is_contiguous()
            assert x.device.type == "cpu"
        assert {x.dtype for x in (*inputs, result, *gradients)} == {inputs[0].dtype}
        assert offsets[0].dtype == offsets[1].dtype == torch.int32
        d_v = result.size(1) // num_heads
        assert d_k % HEAD_MULTIPLE == d_v % HEAD_MULTIPLE == 0
        parts = (*split_inputs(inputs, num_heads * d_k), result, result, *split_inputs(gradients, num_heads * d_k))
        request = _Request(
            *(_Matrix(x.data_ptr(), x.stride(0)) for x in (*parts, normalizers)),
            *(x.data_ptr() for x in offsets),
            len(offsets[0]) - 1,
            num_heads,
            d_k,
            d_v,
            int(offsets[1].diff().max()),
            sentences.is_causal,
            written is not None,
            inputs[0].dtype == torch.bfloat16,
            torch.get_num_threads(),
        )
        if self._compute(ctypes.byref(request)):
            raise MemoryError("not enough memory for attention")


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, program: CompiledAttention, sentences: RowSentences, num_heads: int, d_k: int, *inputs: Tensor
    ) -> Tensor:
        values = split_inputs(list(inputs), num_heads * d_k)[2]
        result = inputs[0].new_empty(inputs[0].size(0), values.size(1))
        normalizers = torch.empty(inputs[0].size(0), num_heads)
        program.run(list(inputs), result, normalizers, None, sentences, num_heads, d_k)
        result[sentences.query_offsets[-1] :] = 0.0
        ctx.save_for_backward(*inputs, normalizers)
        ctx.arguments = program, sentences, num_heads, d_k
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        program, *arguments = ctx.arguments
        *inputs, normalizers = ctx.saved_tensors
        written = [torch.empty_like(x) for x in inputs]
        program.run(inputs, gradients[0].contiguous(), normalizers, written, *arguments)
        sentences = arguments[0]
        written[0][sentences.query_offsets[-1] :] = 0.0
        written[-1][sentences.key_offsets[-1] :] = 0.0
        return None, None, None, None, *written


def agrees(program: CompiledAttention) -> bool:
    """Return whether results and gradients are those of PyTorch's operators, to rounding."""
    return all(_agrees_on(program, dtype, is_causal) for dtype in DTYPES for is_causal in (False, True))


def _agrees_on(program: CompiledAttention, dtype: torch.dtype, is_causal: bool) -> bool:
    # Lengths beside those of vectors and of tiles.
    lengths, num_heads, size = (1, 7, 8, 17, 40, 55), 2, HEAD_MULTIPLE
    offsets = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    sentences = RowSentences(offsets, offsets, max(lengths), is_causal)
    generator = torch.Generator().manual_seed(1)
    projected = torch.randn(sum(lengths), 3 * num_heads * size, generator=generator).to(dtype)
    wrong = projected.clone()
    wrong[0, 0] = math.nan
    if program.attend([wrong], sentences, num_heads, size, 0.0)[0, :size].isfinite().any():
        return False  # -ffast-math lets a compiler assume that there is no NaN; refuse such a build.

    def sentence_by_sentence(x: Tensor) -> Tensor:
        results = []
        for sentence in x.float().split(lengths):
            query, key, value = (y.unflatten(1, (num_heads, size)).transpose(0, 1)[None] for y in sentence.chunk(3, 1))
            bias = torch.full((len(sentence), len(sentence)), -math.inf).triu(1) if is_causal else None
            results.append(attention(query, key, value, bias)[0].transpose(0, 1).flatten(1))
        return torch.cat(results)

    results = []
    for attend in (lambda x: program.attend([x], sentences, num_heads, size, 0.0), sentence_by_sentence):
        leaf = projected.clone().requires_grad_()
        with torch.enable_grad():
            result = attend(leaf)
            results.append([result, *torch.autograd.grad(result, leaf, result.detach().sin())])
    return all(
        bool((own.float() - other).norm() <= _TOLERANCE[dtype] * other.norm())
        for own, other in zip(*results, strict=True)
    )
