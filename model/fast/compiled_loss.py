"""The loss from logits on a CPU, by one compiled program, `loss.cpp`, in place of PyTorch's operators."""

import ctypes
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from model.loss import PYTORCH_LOSS, LossFunctions, label_smoothed_loss

SOURCES = tuple(Path(__file__).parent / name for name in ("loss.cpp", "vectors.h"))
"""The program and its header."""
DTYPES = (torch.float32, torch.bfloat16)
"""Types of logits that the program reads."""
_CLASSES, _WIDTH, _TOKENS = 77, 20, 21
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Largest difference that `agrees` accepts, relative to the norm of what PyTorch's operators compute."""


class _Results(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("largest", "target_logit", "max_probability", "divergence"))


class _Request(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "targets")),
        ("results", _Results),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_classes", "num_threads")),
        *((name, ctypes.c_int64) for name in ("is_bfloat16", "in_pairs", "with_gradient")),
        *((name, ctypes.c_float) for name in ("epsilon", "alpha")),
    )


def load_function(path: Path, name: str, request: type[ctypes.Structure]) -> Callable[[object], int]:
    """Load a compiled program and return its function, which takes a pointer to a request and returns 0 if all is well.

    A program runs with this process's rights: see `pipeline/runtime/compiled_code.py`.

    Raises OSError if the file is no such program.
    """
    try:
        function = getattr(ctypes.CDLL(str(path)), f"compute_{name}")
    except AttributeError as error:
        raise OSError(f"{path} is no compiled {name}: {error}") from None
    function.argtypes, function.restype = [ctypes.POINTER(request)], ctypes.c_int64
    return function


class CompiledLoss:
    """The compiled program. It is pickled as its path."""

    def __init__(self, path: Path) -> None:
        """Load a compiled program, as `load_function` does."""
        self._path, self._compute = path, load_function(path, "loss", _Request)

    def __reduce__(self) -> tuple[type["CompiledLoss"], tuple[Path]]:
        return CompiledLoss, (self._path,)

    def functions(self) -> LossFunctions:
        """Return the program as an implementation for `label_smoothed_loss`."""
        return LossFunctions("C++", self.read_logits, self.read_logit_pairs, in_place=True)

    def read_logits(
        self, logits: Tensor, target: Tensor, sum_dtype: torch.dtype, epsilon: float, with_gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Do what `model.loss.read_logits` does; `logits`, which must be contiguous, are overwritten.

        Logits are float32 or bfloat16, and so are their gradients. Sums and the first three results are float32,
        whatever `sum_dtype` is. The GIL is released.

        Raises:
            IndexError: a target is no class.
            MemoryError: there is no memory for a row in float32.
        """
        largest, target_logits, max_probability = torch.empty(3, len(logits), 1, dtype=torch.float32)
        self._call(logits, target, (largest, target_logits, max_probability), epsilon, with_gradient, 0.0)
        return largest, target_logits, max_probability, logits if with_gradient else None

    def read_logit_pairs(
        self, logits: Tensor, target: Tensor, sum_dtype: torch.dtype, epsilon: float, with_gradient: bool, alpha: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Do what `model.loss.read_logit_pairs` does; for the rest, see `read_logits`."""
        largest, target_logits, max_probability = torch.empty(3, len(logits), 1, dtype=torch.float32)
        divergences = torch.empty(len(logits) // 2, 1, dtype=torch.float32)
        results = (largest, target_logits, max_probability, divergences)
        self._call(logits, target, results, epsilon, with_gradient, alpha)
        return *results, logits if with_gradient else None

    def _call(
        self,
        logits: Tensor,
        target: Tensor,
        results: tuple[Tensor, ...],
        epsilon: float,
        with_gradient: bool,
        alpha: float,
    ) -> None:
        """Run the program. Four results are those of pairs of rows."""
        assert logits.device.type != "cuda"
        assert logits.is_contiguous()
        assert target.is_contiguous()
        assert target.dtype == torch.int64
        assert logits.dtype in DTYPES
        if len(target) and not (target.min() >= 0 and target.max() < logits.size(1)):
            raise IndexError(f"a target is not in 0 .. {logits.size(1) - 1}")
        request = _Request(
            logits.data_ptr(),
            target.data_ptr(),
            _Results(*(result.data_ptr() for result in results)),
            *logits.shape,
            torch.get_num_threads(),
            logits.dtype == torch.bfloat16,
            len(results) == len(_Results._fields_),
            with_gradient,
            epsilon,
            alpha,
        )
        if self._compute(ctypes.byref(request)):
            raise MemoryError("not enough memory for the loss")


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

    def results(functions: LossFunctions) -> list[Tensor]:
        inputs = [(states if alpha else states[0]).clone().requires_grad_(), weight.clone().requires_grad_()]
        with torch.enable_grad(), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            sums = label_smoothed_loss(inputs[0], inputs[1], targets, 0.1, -1, functions=functions, r_drop_alpha=alpha)
        return [*sums, *torch.autograd.grad(sums.smoothed, inputs)]

    pairs = zip(results(loss.functions()), results(PYTORCH_LOSS), strict=True)
    return all(bool((own - other).norm() <= _TOLERANCE[dtype] * other.norm()) for own, other in pairs)


def _keeps_what_is_not_finite(loss: CompiledLoss, dtype: torch.dtype, alpha: float) -> bool:
    """Return whether a logit that is not finite reaches the gradient."""
    # -ffast-math lets a compiler assume that there is no NaN; refuse such a build.
    logits = torch.zeros(4, _CLASSES, dtype=dtype)
    logits[0, 1], logits[2, -1] = math.nan, math.inf
    arguments = (logits, torch.zeros(4, 1, dtype=torch.int64), torch.float32, 0.1, True)
    gradient = (loss.read_logit_pairs(*arguments, alpha) if alpha else loss.read_logits(*arguments))[-1]
    return gradient is not None and not gradient[::2].isfinite().any()
