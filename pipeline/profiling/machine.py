"""This machine's rate of large matrix products, the peak that MFU (model FLOPs utilization) is measured against."""

import time

import torch


class MatrixProduct:
    """A square matrix product, large enough to reach the machine's best rate.

    The rate is measured repeatedly, beside the work that it is compared with.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, size: int | None = None) -> None:
        self._on_gpu = device.type == "cuda"
        self._size = size or (8192 if self._on_gpu else 2048)
        # Its own generator: the global one belongs to training.
        generator = torch.Generator(device).manual_seed(0)
        self._left, self._right, self._product = (
            torch.randn(self._size, self._size, device=device, generator=generator).to(dtype) for _ in range(3)
        )
        self.rate()  # the first product is slow

    def rate(self) -> float:
        """Return the FLOP/s of one product; an addition and a multiplication count as two operations."""
        self._wait()
        start = time.perf_counter()
        torch.mm(self._left, self._right, out=self._product)
        self._wait()
        return 2.0 * self._size**3 / (time.perf_counter() - start)

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()
