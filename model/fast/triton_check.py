"""What the Triton kernels can compute, and a comparison with plain PyTorch on this GPU before training relies on them.

Triton itself is imported only by what runs a kernel.
"""

import math

import torch
from torch import Tensor

from model.loss import PYTORCH_LOSS
from model.packed_attention import split_inputs

LARGEST_HEAD = 128
"""Heads with a larger d_k or d_v do not fit into registers."""
_LENGTHS = [(1, 3), (27, 30), (100, 64), (5, 90)]
"""Tokens of query and key segments."""
_TOLERANCE = {torch.float32: 0.01, torch.float16: 0.02, torch.bfloat16: 0.1}
"""Difference that is accepted, as a share of the largest value. TF32 products round to ten bits."""


def can_run(d_k: int, d_v: int) -> bool:
    """Return whether the kernels can compute heads of these sizes."""
    return max(d_k, d_v) <= LARGEST_HEAD


def failure(dtype: torch.dtype, num_heads: int, d_k: int, d_v: int, device: str = "cuda") -> str | None:
    """Return what is wrong with a kernel on a device, in one line; None if nothing is.

    Args:
        dtype: type of queries, keys, values and logits.
        num_heads: heads of the network's attention.
        d_k: their d_k.
        d_v: their d_v.
        device: the current CUDA device, or a CPU if Triton interprets its kernels.
    """
    heads = num_heads, d_k, d_v
    try:
        checks = {
            "self-attention": _attention(dtype, device, heads, is_cross=False, is_causal=False),
            "causal self-attention": _attention(dtype, device, heads, is_cross=False, is_causal=True),
            "cross-attention": _attention(dtype, device, heads, is_cross=True, is_causal=False),
            "the loss": _loss(dtype, device, 0.0),
            "the loss of R-Drop": _loss(dtype, device, 2.0),
        }
    except Exception as error:  # Triton raises errors of many kinds, its compiler's among them.
        return f"Triton's kernels do not run here: {(str(error) or type(error).__name__).splitlines()[0]}"
    wrong = [name for name, error in checks.items() if not error <= _TOLERANCE[dtype]]
    return f"Triton's kernels give wrong results here, for {', '.join(wrong)}" if wrong else None


def _attention(
    dtype: torch.dtype, device: str, heads: tuple[int, int, int], *, is_cross: bool, is_causal: bool
) -> float:
    """Return the largest error of results and gradients, as a share of the largest value."""
    from model.fast.triton_attention import segment_attention  # imports Triton

    num_heads, d_k, d_v = heads
    query_lengths = [query for query, _ in _LENGTHS]
    key_lengths = [key for _, key in _LENGTHS] if is_cross else query_lengths
    keys_size, values_size = num_heads * d_k, num_heads * d_v
    sizes = [keys_size, keys_size + values_size] if is_cross else [2 * keys_size + values_size]
    rows = [sum(query_lengths), sum(key_lengths)]
    inputs = [_random(count, size, dtype=dtype, device=device) for count, size in zip(rows, sizes, strict=False)]
    gradient = _random(rows[0], values_size, dtype=dtype, device=device)
    segments = [_ids(lengths).to(device) for lengths in (query_lengths, key_lengths)]
    segments += [_offsets(lengths).to(device) for lengths in (query_lengths, key_lengths)]
    for x in inputs:
        x.requires_grad_()
    result = segment_attention(inputs, segments, None, num_heads, d_k, is_causal)[0]
    actual = [result, *torch.autograd.grad(result, inputs, gradient)]

    # On the CPU, so that it does not depend on anything of the GPU.
    exact = [x.detach().cpu().double().requires_grad_() for x in inputs]
    query, key, value = (x.unflatten(1, (num_heads, -1)).transpose(0, 1) for x in split_inputs(exact, keys_size))
    allowed = segments[0].cpu()[:, None] == segments[1].cpu()
    if is_causal:
        allowed = allowed.tril()
    weights = (query @ key.mT / math.sqrt(d_k)).masked_fill(~allowed, float("-inf")).softmax(-1)
    truth = (weights @ value).transpose(0, 1).flatten(1)
    return _largest_error(actual, [truth, *torch.autograd.grad(truth, exact, gradient.cpu().double())])


def _loss(dtype: torch.dtype, device: str, alpha: float) -> float:
    """Return the largest error of the functions that read logits: of one pass or, with `alpha`, of two."""
    from model.fast.triton_loss import TRITON_LOSS  # imports Triton

    logits = 3.0 * _random(40, 9000, dtype=dtype, device=device)
    exact, targets = logits.cpu().double(), torch.arange(20).repeat_interleave(2).unsqueeze(1)
    results = []
    for functions, x, sum_dtype in ((PYTORCH_LOSS, exact, torch.float64), (TRITON_LOSS, logits, torch.float32)):
        arguments = x, targets.to(x.device), sum_dtype, 0.1, True
        read = functions.read_logit_pairs(*arguments, alpha) if alpha else functions.read_logits(*arguments)
        results.append([tensor for tensor in read if tensor is not None])
    return _largest_error(results[1], results[0])


def _random(*size: int, dtype: torch.dtype, device: str) -> Tensor:
    generator = torch.Generator(device).manual_seed(sum(size))
    return torch.randn(size, generator=generator, device=device).to(dtype)


def _ids(lengths: list[int]) -> Tensor:
    return torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(torch.tensor(lengths))


def _offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def _largest_error(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference as a share of the largest value of its tensor; NaN if there is any NaN."""
    errors = [
        (tensor.detach().cpu().double() - truth.detach()).abs().max() / truth.detach().abs().max()
        for tensor, truth in zip(actual, expected, strict=True)
    ]
    return float(torch.stack(errors).max())
