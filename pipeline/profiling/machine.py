"""What this machine can do at most: the rate of large matrix products."""

import time

import torch


class MatrixProduct:
    """A square product, large enough for the machine's best rate, timed now and again beside what is measured."""

    def __init__(self, device: torch.device, dtype: torch.dtype, size: int | None = None) -> None:
        self._on_gpu = device.type == "cuda"
        self._size = size or (8192 if self._on_gpu else 2048)
        # A generator of its own: beside training, the global one is not to be moved.
        generator = torch.Generator(device).manual_seed(0)
        self._left, self._right, self._product = (
            torch.randn(self._size, self._size, device=device, generator=generator).to(dtype) for _ in range(3)
        )
        self.rate()  # the first one is slow

    def rate(self) -> float:
        """FLOP/s of one product; an addition and a multiplication are two."""
        self._wait()
        start = time.perf_counter()
        torch.mm(self._left, self._right, out=self._product)
        self._wait()
        return 2.0 * self._size**3 / (time.perf_counter() - start)

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()
