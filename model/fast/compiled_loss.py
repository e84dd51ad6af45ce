"""What the loss computes from logits on a CPU by one compiled program, `loss.cpp`, in place of PyTorch's operators.

Only the caller knows where a compiled program may come from: see `pipeline/runtime/compiled_code.py`.
"""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

SOURCES = tuple(Path(__file__).parent / name for name in ("loss.cpp", "vectors.h"))
"""The program and its header."""
DTYPES = (torch.float32, torch.bfloat16)
"""Types of logits that the program reads."""


class _Results(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("largest", "target_logit", "most_probable", "divergence"))


class _Request(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "targets")),
        ("results", _Results),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_classes", "num_threads")),
        *((name, ctypes.c_int64) for name in ("is_bfloat16", "in_pairs", "with_gradient")),
        *((name, ctypes.c_float) for name in ("epsilon", "alpha")),
    )


class CompiledLoss:
    """The compiled program. It is pickled as its path."""

    def __init__(self, path: Path) -> None:
        """Load a compiled program. It runs with this process's rights: the caller vouches for its origin.

        Raises:
            OSError: the file is no such program.
        """
        self._path = path
        try:
            self._compute = ctypes.CDLL(str(path)).compute_loss
        except AttributeError as error:
            raise OSError(f"{path} is no compiled loss: {error}") from None
        self._compute.argtypes, self._compute.restype = [ctypes.POINTER(_Request)], ctypes.c_int64

    def __reduce__(self) -> tuple[type["CompiledLoss"], tuple[Path]]:
        return CompiledLoss, (self._path,)

    def over_classes(
        self, logits: Tensor, target: Tensor, sum_dtype: torch.dtype, epsilon: float, with_gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Do what `model.loss._over_classes` does; `logits`, which must be contiguous, are overwritten.

        Logits are float32 or bfloat16, and so are their gradients. Sums and the first three results are float32,
        whatever `sum_dtype` is. The GIL is released.

        Raises:
            IndexError: a target is no class.
            MemoryError: there is no memory for a row in float32.
        """
        largest, target_logits, most_probable = torch.empty(3, len(logits), 1, dtype=torch.float32)
        self._call(logits, target, (largest, target_logits, most_probable), epsilon, with_gradient, 0.0)
        return largest, target_logits, most_probable, logits if with_gradient else None

    def over_class_pairs(
        self, logits: Tensor, target: Tensor, sum_dtype: torch.dtype, epsilon: float, with_gradient: bool, alpha: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Do what `model.loss._over_class_pairs` does; for the rest, see `over_classes`."""
        largest, target_logits, most_probable = torch.empty(3, len(logits), 1, dtype=torch.float32)
        divergences = torch.empty(len(logits) // 2, 1, dtype=torch.float32)
        results = (largest, target_logits, most_probable, divergences)
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
