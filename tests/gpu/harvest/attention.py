"""Stage `attention`: the kernels for packed rows on sentences of several mean lengths, then those for padded batches.

A step has 25,000 tokens. Packed rows go through the functions that training calls.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from model.segment_attention import cross_attention, packed_segments, self_attention
from tests.gpu.harvest.batches import Shares
from tests.gpu.harvest.job import Job, per_second

HEADS, HEAD_SIZE = {"base": 8, "big": 16}, 64
KINDS = {"self": 0, "causal": 1, "cross": 2}
"""Index of each attention in the result of `packed_segments`."""
MEAN_LENGTHS = (27, 64, 200)
PACKED = {
    "triton": ("one of 25,000", "triton"),
    "variable length": ("one of 25,000", "pytorch"),
    "blocks": ("one of 25,000, in blocks", "pytorch"),
}
"""Layout and kernels."""
TILES = [(16, 16, 2), (32, 32, 4), (64, 64, 4), (128, 32, 4), (128, 64, 8)]
"""Rows of a program, rows of the other side that it processes at a time, and warps; in place of the kernels' own."""
PADDED = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "plain products": SDPBackend.MATH,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
"""cuDNN, which training disables, comes last: after a GPU error a process cannot use the GPU any more."""


def run(job: Job) -> None:
    """Run the stage."""
    for mean in (8,) if job.tiny else MEAN_LENGTHS:
        for kernel in PACKED:
            for heads in HEADS:
                for kind in KINDS if heads == "base" else ("self",):
                    _attempt(job, kernel, heads, mean, kind)
    for tiles in TILES[:1] if job.tiny else TILES:
        for mean in (8,) if job.tiny else (27, 200):
            _attempt(job, "triton", "base", mean, "self", tiles)
    tokens, lengths = (64, (8, 9)) if job.tiny else (25_000, MEAN_LENGTHS)
    for kernel in PADDED:
        for length in lengths:
            for causal in (False, True):
                job.attempt(
                    kernel,
                    lambda n=tokens // length, t=length, c=causal, k=kernel: _padded(job, k, n, t, c),
                    length=length,
                    causal=causal,
                )


def _attempt(
    job: Job, kernel: str, heads: str, mean: int, kind: str, tiles: tuple[int, int, int] | None = None
) -> None:
    about = {"heads": heads, "mean_length": mean, "kind": kind, **({"tiles": tiles} if tiles else {})}

    def measured() -> dict[str, Any]:
        if tiles is None:
            return _packed(job, kernel, HEADS[heads], mean, kind)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("model.gpu.segment_kernels.tiles", lambda kernel, *_: _tile(kernel, *tiles))
            return _packed(job, kernel, HEADS[heads], mean, kind)

    job.attempt(kernel, measured, **about)


def _tile(kernel: Any, own: int, others: int, warps: int) -> dict[str, int]:
    from model.gpu import segment_kernels

    queries, keys = (others, own) if kernel is segment_kernels._backward_keys else (own, others)
    return {"QUERIES": queries, "KEYS": keys, "num_warps": warps, "num_stages": 2}


def _packed(job: Job, kernel: str, heads: int, mean: int, kind: str) -> dict[str, Any]:
    layout, kernels = PACKED[kernel]
    shares = Shares(layout, pieces=100, tokens=120 if job.tiny else 25_000, mean_length=mean)
    batch = next(iter(shares)).to(job.device).micro_batches[0]
    segments = packed_segments(batch, torch.bfloat16, kernels)[KINDS[kind]]
    rows = {"source": batch.source.numel(), "target": batch.target_input.numel()}
    width = heads * HEAD_SIZE

    def draw(side: str, columns: int) -> Tensor:
        return torch.randn(rows[side], columns, device=job.device).bfloat16().requires_grad_()

    if kind == "cross":
        tensors = [draw("target", width), draw("source", 2 * width)]
    else:
        tensors = [draw("source" if kind == "self" else "target", 3 * width)]

    def forward() -> Tensor:
        if kind == "cross":
            return cross_attention(tensors[0], tensors[1], segments, heads, HEAD_SIZE)
        return self_attention(tensors[0], segments, heads, HEAD_SIZE)

    source, target = shares.lengths()
    queries, keys = source if kind == "self" else target, target if kind == "causal" else source
    flops = 4 * width * float((queries * keys).sum())
    return {"sentences": len(source), **_times(job, forward, tensors, flops)}


def _times(job: Job, forward: Callable[[], Tensor], tensors: list[Tensor], flops: float) -> dict[str, Any]:
    """Return the times, and rates of the FLOPs that sentences need, without what a mask hides."""
    gradient = torch.randn_like(forward())
    forward_ms = job.milliseconds(forward, head_start=3.0)
    both_ms = job.milliseconds(lambda: torch.autograd.grad(forward(), tensors, gradient), head_start=3.0)
    return {
        "forward_milliseconds": forward_ms,
        "forward_and_backward_milliseconds": both_ms,
        "forward_flops_per_second": per_second(flops, forward_ms),
        "forward_and_backward_flops_per_second": per_second(3.5 * flops, both_ms),
    }


def _padded(job: Job, kernel: str, sentences: int, length: int, causal: bool) -> dict[str, Any]:
    """Measure a kernel on sentences of one length, with the heads of the base model."""
    shape = (sentences, length, HEADS["base"], HEAD_SIZE)
    # The layout that projections produce: a token's heads are adjacent.
    tensors = [torch.randn(shape, device=job.device).bfloat16().requires_grad_() for _ in range(3)]

    def forward() -> Tensor:
        query, key, value = (tensor.transpose(1, 2) for tensor in tensors)
        with sdpa_kernel([PADDED[kernel]]):
            return F.scaled_dot_product_attention(query, key, value, is_causal=causal)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            forward()
        except RuntimeError as error:
            reasons = [str(one.message).split("(Triggered")[0].strip() for one in said]
            raise RuntimeError("; ".join([str(error), *dict.fromkeys(reasons)])) from error
    flops = 4.0 * sentences * HEADS["base"] * length * length * HEAD_SIZE
    return {"sentences": sentences, **_times(job, forward, tensors, flops)}
