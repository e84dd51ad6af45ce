"""Stages `rates`, `attention`, `loss` and `decoding`: operations and searches of the paper's sizes, in bfloat16."""

import random
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import model.loss
from model.attention import attention
from model.decoding import BeamSearch
from model.fast import triton_attention
from model.fast.triton_attention import TRITON_ATTENTION
from model.loss import label_smoothed_loss
from model.packed_attention import FLASH_ATTENTION, PLAIN_ATTENTION, attend_in_groups, packed_segments
from model.settings import NetworkSettings
from model.transformer import Transformer
from pipeline.benchmark.train import PeakMemory
from tests.gpu.backends import make_backend
from tests.gpu.harvest.job import PIECES, SPECIAL, STEP_TOKENS, Job, pair_lengths, per_second, training_steps
from tests.model.search_truth import make_sources

D_MODEL, HEAD_SIZE = 512, 64
PRODUCTS = {
    "square": (8192, 8192, 8192),
    "query, key, value": (STEP_TOKENS, D_MODEL, 3 * D_MODEL),
    "feed-forward, inner": (STEP_TOKENS, D_MODEL, 2048),
    "feed-forward, outer": (STEP_TOKENS, 2048, D_MODEL),
    "output projection": (12_544, D_MODEL, PIECES),
}
"""Rows, inputs and outputs. The last has the rows of the loss's chunk on a GPU of 80 GB."""
KINDS = ("self", "causal", "cross")
"""In the order of the results of `packed_segments`."""
PACKED = {"triton": TRITON_ATTENTION, "variable length": FLASH_ATTENTION, "groups": PLAIN_ATTENTION}
TILES = [(16, 16, 2), (32, 32, 4), (64, 64, 4), (128, 32, 4), (128, 64, 8)]
"""Rows of a program, rows of the other side that it processes at a time, and warps; in place of the kernels' own."""
PADDED = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "plain products": SDPBackend.MATH,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
"""cuDNN, which training disables, comes last: after a GPU error a process cannot use the GPU any more."""
SHARES = [1 / 64, 1 / 512, 1 / 256, 1 / 128, 1 / 32, 1 / 16]
"""Shares of the GPU's memory for a chunk of the loss. The first one is that of training."""


def run_rates(job: Job) -> None:
    """Measure memory copies, and the products of linear layers and of their backward passes."""
    num_bytes = 2**20 if job.tiny else 2**31
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=job.device)
    target = torch.empty_like(source)
    milliseconds = job.milliseconds(lambda: target.copy_(source), head_start=1.0)
    rate = per_second(2 * num_bytes, milliseconds)
    job.record("copy", bytes_read_and_written=2 * num_bytes, milliseconds=milliseconds, bytes_per_second=rate)
    for name, sizes in PRODUCTS.items():
        rows, inputs, outputs = sizes = tuple(size // 100 for size in sizes) if job.tiny else sizes
        x, weight, gradient = _draw(job, rows, inputs), _draw(job, outputs, inputs), _draw(job, rows, outputs)
        products: dict[str, Callable[[], Any]] = {
            "forward": partial(torch.mm, x, weight.t()),
            "weight gradient": _weight_gradient(job, name, gradient, x),
            "input gradient": partial(torch.mm, gradient, weight),
        }
        for kind, work in products.items():
            milliseconds = job.milliseconds(work, head_start=1.0)
            rate = per_second(2 * rows * inputs * outputs, milliseconds)
            job.record(f"{name}, {kind}", sizes=sizes, milliseconds=milliseconds, flops_per_second=rate)


def _weight_gradient(job: Job, name: str, gradient: Tensor, x: Tensor) -> Callable[[], Any]:
    """Return the product that training does: its result is float32, and that of the loss is added to a sum."""
    if name == "output projection":
        total = torch.zeros(gradient.size(1), x.size(1), device=job.device)
        return partial(model.loss._add_product, total, gradient.t(), x)
    options = {"out_dtype": torch.float32} if job.device.type == "cuda" else {}
    return partial(torch.mm, gradient.t(), x, **options)


def _draw(job: Job, *shape: int) -> Tensor:
    return torch.randn(*shape, device=job.device, dtype=torch.bfloat16)


def run_attention(job: Job) -> None:
    """Measure attention in packed rows, as training calls it, then the kernels for padded batches."""
    tokens, means = (120, (8,)) if job.tiny else (STEP_TOKENS, (27, 64, 200))
    cases = [(kernel, 8, mean, kind, None) for mean, kernel, kind in product(means, PACKED, KINDS)]
    cases += [(kernel, 16, mean, "self", None) for mean, kernel in product(means, PACKED)]
    cases += [("triton", 8, mean, "self", tiles) for tiles, mean in product(TILES, means) if mean != 64]
    for kernel, heads, mean, kind, tiles in cases:
        about = {"heads": heads, "mean_length": mean, "kind": kind, "tiles": tiles}
        job.attempt(kernel, lambda k=kernel, a=about: _packed(job, k, tokens, **a), **about)
    for kernel, length, causal in product(PADDED, means, (False, True)):
        about = {"sentences": tokens // length, "length": length, "causal": causal}
        job.attempt(kernel, lambda k=kernel, a=about: _padded(job, k, **a), **about)


def _packed(
    job: Job, kernel: str, tokens: int, heads: int, mean_length: int, kind: str, tiles: tuple[int, int, int] | None
) -> dict[str, Any]:
    lengths = pair_lengths(tokens, mean_length)
    [batch] = training_steps(lengths, 100)[0].to(job.device).micro_batches
    segments = packed_segments(batch, torch.bfloat16, PACKED[kernel])[KINDS.index(kind)]
    rows = {"source": batch.source.numel(), "target": batch.target_input.numel()}
    width = heads * HEAD_SIZE
    if kind == "cross":
        tensors = [_draw(job, rows["target"], width), _draw(job, rows["source"], 2 * width)]
    else:
        tensors = [_draw(job, rows["source" if kind == "self" else "target"], 3 * width)]
    compute = segments.kernel or partial(attend_in_groups, attention)
    sizes = (heads, HEAD_SIZE, 0.0) if segments.kernel else (heads, HEAD_SIZE)
    source, target = lengths
    queries, keys = source if kind == "self" else target, target if kind == "causal" else source
    flops = 4 * width * float((queries * keys).sum())
    with pytest.MonkeyPatch.context() as patch:
        if tiles is not None:
            patch.setattr(triton_attention, "tiles", lambda kernel, *_: _tile(kernel, *tiles))
        times = _times(job, lambda: compute(tensors, segments, *sizes), tensors, flops)
    return {"sentences": len(source), **times}


def _tile(kernel: Any, own: int, others: int, warps: int) -> dict[str, int]:
    queries, keys = (others, own) if kernel is triton_attention._backward_keys else (own, others)
    return {"QUERIES": queries, "KEYS": keys, "num_warps": warps, "num_stages": 2}


def _padded(job: Job, kernel: str, sentences: int, length: int, causal: bool) -> dict[str, Any]:
    """Measure a kernel on sentences of one length, with the heads of the base model."""
    # The layout that projections produce: a token's heads are adjacent.
    tensors = [_draw(job, sentences, length, 8, HEAD_SIZE) for _ in range(3)]

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
    return _times(job, forward, tensors, flops=4.0 * sentences * 8 * length * length * HEAD_SIZE)


def _times(job: Job, forward: Callable[[], Tensor], tensors: list[Tensor], flops: float) -> dict[str, Any]:
    """Return the times, and rates of the FLOPs that sentences need, without what a mask hides."""
    for tensor in tensors:
        tensor.requires_grad_()
    gradient = torch.randn_like(forward())
    forward_ms = job.milliseconds(forward, head_start=3.0)
    both_ms = job.milliseconds(lambda: torch.autograd.grad(forward(), tensors, gradient), head_start=3.0)
    return {
        "forward_milliseconds": forward_ms,
        "forward_and_backward_milliseconds": both_ms,
        "forward_flops_per_second": per_second(flops, forward_ms),
        "forward_and_backward_flops_per_second": per_second(3.5 * flops, both_ms),
    }


def run_loss(job: Job) -> None:
    """Measure the loss of the base model by both kernels and by chunk, and with R-Drop, which has two passes."""
    rows, d_model, pieces = (50, 16, 300) if job.tiny else (STEP_TOKENS, D_MODEL, PIECES)
    weight = torch.randn(pieces, d_model, device=job.device, requires_grad=True)
    targets = torch.randint(1, pieces, (rows,), device=job.device)
    for share, kernels, passes in product(SHARES, ("triton", "pytorch"), (1, 2)):
        if passes == 1 or share == SHARES[0]:
            # As the network returns them.
            states = _draw(job, *[2] * (passes - 1), rows, d_model).requires_grad_()
            about = {"memory_share": share, "kernels": kernels}
            job.attempt("loss", lambda s=states, a=about: _loss(job, s, weight, targets, **a), **about, passes=passes)


def _loss(
    job: Job, states: Tensor, weight: Tensor, targets: Tensor, memory_share: float, kernels: str
) -> dict[str, Any]:
    functions = make_backend(job.device.type, kernels).loss
    passes = states.dim() - 1
    alpha = 5.0 if passes == 2 else 0.0

    def step() -> None:
        with torch.autocast(job.device.type, torch.bfloat16):
            sums = label_smoothed_loss(states, weight, targets, 0.1, 0, 1 / len(targets), functions, alpha)
        sums.smoothed.backward()
        states.grad = weight.grad = None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.loss, "_CHUNK_SHARE", memory_share)
        rows = passes * len(targets)
        chunk = model.loss._chunk_tokens(rows, len(weight), job.device, torch.bfloat16, functions.in_place, passes)
        step()  # compiles
        memory = PeakMemory(job.device)
        step()
        peak = memory.read()
        milliseconds = job.milliseconds(step, repeats=10, warm_up=1, head_start=30.0)
    rate = per_second(6 * states.numel() * weight.size(0), milliseconds)
    return {"chunk_rows": chunk, "milliseconds": milliseconds, "peak_memory_bytes": peak, "flops_per_second": rate}


def run_decoding(job: Job) -> None:
    """Measure beam search with beam 4, 6+6 and 12+2 layers and random weights: nearly all answers reach their limit."""
    sizes, pieces = ({"d_model": 16, "d_ff": 16, "num_heads": 2}, 100) if job.tiny else ({}, PIECES)
    for encoder_layers, decoder_layers in ((6, 6), (12, 2)):
        torch.manual_seed(1)
        depths = {"num_encoder_layers": encoder_layers, "num_decoder_layers": decoder_layers}
        network = Transformer(pieces, NetworkSettings(**sizes, **depths)).to(job.device)
        for dtype, sentences in product((torch.bfloat16, torch.float32), (2, 3) if job.tiny else (64, 256)):
            search = BeamSearch(network.to(dtype), SPECIAL.bos, SPECIAL.eos, SPECIAL.pad).eval()
            weights = str(dtype).removeprefix("torch.")
            about = {"layers": f"{encoder_layers}+{decoder_layers}", "weights": weights, "sentences": sentences}
            lengths = random.Random(1).choices(range(22, 33), k=sentences)  # 27 on average
            source = [one.to(job.device) for one in make_sources(lengths, pieces)]
            job.attempt("beam 4", lambda s=search, x=source: _search(job, s, *x), **about)


def _search(job: Job, search: BeamSearch, source: Tensor, mask: Tensor) -> dict[str, Any]:
    answers = search.beam(source, mask, 4, 0.6, 5, 1)
    tokens, steps = int(answers.lengths[:, 0].sum()), int(answers.lengths.max())
    milliseconds = job.milliseconds(lambda: search.beam(source, mask, 4, 0.6, 5, 1), repeats=5, warm_up=1)
    figures = {"milliseconds": milliseconds, "step_milliseconds": milliseconds / steps}
    return {"steps": steps, "tokens": tokens, **figures, "tokens_per_second": per_second(tokens, milliseconds)}
