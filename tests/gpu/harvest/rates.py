"""Stage `rates`: memory copies, and bfloat16 matrix products of the sizes that training uses."""

import torch
import torch.nn.functional as F

from tests.gpu.harvest.job import Job, per_second

TOKENS, D_MODEL, PIECES = 25_000, 512, 37_000
CHUNK = 12_544
"""Rows of logits per chunk of the loss on a GPU of 80 GB."""
LINEARS = {
    "query, key, value": (TOKENS, D_MODEL, 3 * D_MODEL),
    "feed-forward, inner": (TOKENS, D_MODEL, 2048),
    "feed-forward, outer": (TOKENS, 2048, D_MODEL),
    "output projection": (CHUNK, D_MODEL, PIECES),
}
"""Rows, inputs and outputs."""


def run(job: Job) -> None:
    """Run the stage."""
    _copy(job, 2**20 if job.tiny else 2**31)
    square = 64 if job.tiny else 8192
    _linear(job, "square", square, square, square)
    for name, sizes in LINEARS.items():
        _linear(job, name, *(max(1, size // 100) for size in sizes) if job.tiny else sizes)


def _copy(job: Job, num_bytes: int) -> None:
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=job.device)
    target = torch.empty_like(source)
    milliseconds = job.milliseconds(lambda: target.copy_(source), head_start=1.0)
    rate = per_second(2 * num_bytes, milliseconds)
    job.record("copy", bytes_read_and_written=2 * num_bytes, milliseconds=milliseconds, bytes_per_second=rate)


def _linear(job: Job, name: str, rows: int, inputs: int, outputs: int) -> None:
    """Measure the product of a linear layer and those of its backward pass."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=job.device).bfloat16()

    x, weight, gradient = draw(rows, inputs), draw(outputs, inputs), draw(rows, outputs)
    products = {
        "forward": lambda: F.linear(x, weight),
        "weight gradient": lambda: gradient.t() @ x,
        "input gradient": lambda: gradient @ weight,
    }
    for kind, product in list(products.items())[: 1 if name == "square" else None]:
        milliseconds = job.milliseconds(product, head_start=1.0)
        rate = per_second(2 * rows * inputs * outputs, milliseconds)
        sizes = [rows, inputs, outputs]
        job.record(f"{name}, {kind}", sizes=sizes, milliseconds=milliseconds, flops_per_second=rate)
