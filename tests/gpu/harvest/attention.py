"""Stage `attention`: each kernel at each sentence length, with 25,000 tokens and the heads of the base model."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.gpu.harvest.job import Job, per_second

LENGTHS = (27, 8, 16, 32, 48, 64, 128, 256)
HEADS, HEAD_SIZE = 8, 64
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "plain products": SDPBackend.MATH,
    "variable length": None,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
"""cuDNN, which training disables, comes last: after a GPU error a process cannot use the GPU any more."""


def run(job: Job) -> None:
    """Run the stage."""
    tokens, lengths = (64, (8, 9)) if job.tiny else (25_000, LENGTHS)
    for kernel in KERNELS:
        for length in lengths:
            for causal in (False, True):
                job.attempt(
                    kernel,
                    lambda n=tokens // length, t=length, c=causal, k=kernel: _measured(job, k, n, t, c),
                    length=length,
                    causal=causal,
                )


def _measured(job: Job, kernel: str, sentences: int, length: int, causal: bool) -> dict[str, Any]:
    shape = (sentences, length, HEADS, HEAD_SIZE)
    # The layout that projections produce: a token's heads are adjacent.
    tensors = [torch.randn(shape, device=job.device).bfloat16().requires_grad_() for _ in range(3)]
    forward = _variable_length(tensors, causal) if kernel == "variable length" else _dense(tensors, causal, kernel)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            result = forward()
        except RuntimeError as error:
            reasons = [str(one.message).split("(Triggered")[0].strip() for one in said]
            raise RuntimeError("; ".join([str(error), *dict.fromkeys(reasons)])) from error
    gradient = torch.randn_like(result)
    forward_ms = job.milliseconds(forward, head_start=3.0)
    both_ms = job.milliseconds(lambda: torch.autograd.grad(forward(), tensors, gradient), head_start=3.0)
    flops = 4 * sentences * HEADS * length * length * HEAD_SIZE
    return {
        "sentences": sentences,
        "forward_milliseconds": forward_ms,
        "forward_and_backward_milliseconds": both_ms,
        "forward_flops_per_second": per_second(flops, forward_ms),
        "forward_and_backward_flops_per_second": per_second(3.5 * flops, both_ms),
    }


def _dense(tensors: list[Tensor], causal: bool, kernel: str) -> Callable[[], Tensor]:
    backend = KERNELS[kernel]
    assert backend is not None

    def forward() -> Tensor:
        query, key, value = (tensor.transpose(1, 2) for tensor in tensors)
        with sdpa_kernel([backend]):
            return F.scaled_dot_product_attention(query, key, value, is_causal=causal)

    return forward


def _variable_length(tensors: list[Tensor], causal: bool) -> Callable[[], Tensor]:
    from torch.nn.attention.varlen import varlen_attn

    sentences, length = tensors[0].shape[:2]
    starts = torch.arange(0, sentences * length + 1, length, dtype=torch.int32, device=tensors[0].device)
    window = (-1, 0) if causal else (-1, -1)

    def forward() -> Tensor:
        query, key, value = (tensor.flatten(0, 1) for tensor in tensors)
        found = varlen_attn(query, key, value, starts, starts, length, length, window_size=window)
        assert isinstance(found, Tensor)
        return found

    return forward
