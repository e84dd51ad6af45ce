"""Label-smoothed cross-entropy, fused with the output projection (sections 3.4 and 5.4).

The smoothed target gives every one of the V classes epsilon / V and the right one 1 - epsilon besides: PyTorch's
and OpenNMT's definition. (fairseq spreads epsilon over the V - 1 wrong classes, tensor2tensor subtracts a
constant: their losses are not comparable with these to the last digit.)

A batch of 25,000 tokens over 37,000 pieces has 0.9 billion logits. They are never held at once: a chunk of rows
at a time is projected, and its gradients are worked out on the spot, so that the backward pass only scales them.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from model.compilation import mark_dynamic
from model.cpu.linear import compiles_each_shape, rows_missing

_CHUNK_LOGITS = {"cpu": 1 << 24, "cuda": 1 << 26}
"""Logits held at a time: on a CPU what makes its products large enough, on a GPU what fills it (0.7 GB)."""
_CACHED_LOGITS = 1 << 18
"""Of these a CPU's softmax has so many a thread at a time, which its cache holds."""


class LossSums(NamedTuple):
    """Sums over the target tokens of a micro-batch, all float32 (float64 for float64 states) scalars."""

    smoothed: Tensor
    """Label-smoothed cross-entropy: what is trained on; the only one that carries gradients."""
    negative_log_likelihood: Tensor
    """Without smoothing; its mean's exponential is the perplexity."""
    num_correct: Tensor
    """How often the right class is the likeliest (ties count, which bf16 has a few of)."""


def label_smoothed_loss(
    states: Tensor, weight: Tensor, targets: Tensor, label_smoothing: float, ignored_id: int, compiled: bool = False
) -> LossSums:
    """Sums of the loss over all positions whose target is not `ignored_id`.

    Args:
        states: decoder states [..., D].
        weight: output projection [V, D].
        targets: integers [...], the pieces to predict.
        label_smoothing: epsilon in [0, 1).
        ignored_id: the padding symbol.
        compiled: pass over the logits by compiled kernels, which on a GPU read and write them a third as often.

    Products run at autocast's precision where it is on; softmax, logarithms and sums at float32 or better.
    """
    device = states.device.type
    product_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype
    # Inside `forward` gradients are always off, and a parameter wants its own even under inference_mode.
    with_gradient = torch.is_grad_enabled() and (states.requires_grad or weight.requires_grad)
    states, targets = states.reshape(-1, states.size(-1)), targets.reshape(-1).long()
    if compiles_each_shape(states):  # rows whose target is ignored count for nothing
        missing = rows_missing(states)
        states, targets = F.pad(states, (0, 0, 0, missing)), F.pad(targets, (0, missing), value=ignored_id)
    return LossSums(
        *_FusedLoss.apply(
            states,
            weight,
            targets,
            label_smoothing,
            ignored_id,
            product_dtype,
            with_gradient,
            compiled,
        )
    )


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        targets: Tensor,
        epsilon: float,
        ignored_id: int,
        product_dtype: torch.dtype,
        with_gradient: bool,
        compiled: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(states.device.type, enabled=False):
            return _forward(ctx, states, weight, targets, epsilon, ignored_id, product_dtype, with_gradient, compiled)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grad_states, grad_weight = ctx.saved_tensors
        scale = gradients[0]
        return (
            grad_states * scale.to(grad_states.dtype) if grad_states is not None else None,
            grad_weight * scale.to(grad_weight.dtype) if grad_weight is not None else None,
            *[None] * 6,
        )


def _forward(
    ctx: Any,
    states: Tensor,
    weight: Tensor,
    targets: Tensor,
    epsilon: float,
    ignored_id: int,
    product_dtype: torch.dtype,
    with_gradient: bool,
    compiled: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, vocabulary_size = states.size(0), weight.size(0)
    sum_dtype = torch.promote_types(states.dtype, torch.float32)
    projection = weight.to(product_dtype)
    # The smoothing term needs each row's sum of logits. sum_v h . w_v is h . (sum_v w_v): no pass over the logits,
    # and neither has its gradient, which is the same for every class.
    weight_sum = weight.to(sum_dtype).sum(0)
    smoothed = states.new_zeros((), dtype=sum_dtype)
    likelihood = states.new_zeros((), dtype=sum_dtype)
    num_correct = states.new_zeros((), dtype=sum_dtype)
    grad_states = torch.empty_like(states) if with_gradient else None
    grad_weight = torch.zeros_like(weight, dtype=sum_dtype) if with_gradient else None
    kept_states_sum = torch.zeros_like(weight_sum)

    over_rows = _over_rows_in_cache if states.device.type == "cpu" else _over_rows
    chunk_rows = max(1, _CHUNK_LOGITS.get(states.device.type, 1 << 24) // vocabulary_size)
    for start in range(0, num_rows, chunk_rows):
        rows = slice(start, min(start + chunk_rows, num_rows))
        chunk, target = states[rows], targets[rows].unsqueeze(1)
        product_chunk = chunk.to(product_dtype)
        logits = product_chunk @ projection.t()
        mean_logits = (chunk.to(sum_dtype) @ weight_sum).unsqueeze(1) / vocabulary_size
        kept, target_loss, mean_loss, correct, difference = over_rows(
            compiled, logits, target, mean_logits, epsilon, ignored_id, with_gradient
        )
        likelihood += (target_loss * kept).sum()
        smoothed += (((1.0 - epsilon) * target_loss + epsilon * mean_loss) * kept).sum()
        num_correct += (correct * kept).sum()
        if grad_states is not None and grad_weight is not None and difference is not None:
            gradient = difference @ projection
            grad_states[rows] = (gradient.to(sum_dtype) - weight_sum * (epsilon / vocabulary_size)) * kept
            kept_chunk = chunk.to(sum_dtype) * kept
            grad_weight += difference.t() @ kept_chunk.to(product_dtype)
            kept_states_sum += kept_chunk.sum(0)
        del logits, difference  # lest the next chunk's stand beside them
    if grad_states is not None and grad_weight is not None:
        grad_weight -= kept_states_sum * (epsilon / vocabulary_size)
        ctx.save_for_backward(grad_states, grad_weight.to(weight.dtype))
    ctx.mark_non_differentiable(likelihood, num_correct)
    ctx.set_materialize_grads(False)
    return smoothed, likelihood, num_correct


def _over_classes(
    logits: Tensor, target: Tensor, mean_logits: Tensor, epsilon: float, ignored_id: int, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """All that goes over a chunk of logits [rows, V].

    Args:
        logits: products of states and weights.
        target: int64 [rows, 1].
        mean_logits: their mean over classes [rows, 1], in the type that sums have.
        epsilon: the label smoothing.
        ignored_id: the padding symbol.
        with_gradient: work out the last result too.

    Returns: [rows, 1] 1 for a real target and 0 for padding, the target's negative log-likelihood, the classes' mean
    one, whether the target is the likeliest; and [rows, V] d smoothed / d logits, less -epsilon / V.
    """
    sum_dtype = mean_logits.dtype
    kept = (target != ignored_id).to(sum_dtype)
    probabilities = torch.softmax(logits, -1, dtype=sum_dtype)
    # The largest probability is never below 1 / V, so the normaliser comes from it without overflow.
    largest, target_logits = logits.amax(-1, keepdim=True), logits.gather(1, target)
    log_normaliser = largest.to(sum_dtype) - probabilities.amax(-1, keepdim=True).log()
    difference: Tensor | None = None
    if with_gradient:
        # d loss / d logits = p - (1 - epsilon) onehot - epsilon / V; the last term is added as a whole elsewhere.
        if torch.compiler.is_compiling():
            is_target = torch.arange(logits.size(1), device=logits.device) == target  # never stored, unlike below
            difference = (probabilities + is_target * (epsilon - 1.0)).to(logits.dtype)
        else:
            probabilities.scatter_add_(1, target, kept.new_full(target.shape, epsilon - 1.0))
            difference = probabilities.to(logits.dtype)
    target_loss = log_normaliser - target_logits.to(sum_dtype)
    return kept, target_loss, log_normaliser - mean_logits, target_logits == largest, difference


def _over_rows(compiled: bool, logits: Tensor, target: Tensor, mean_logits: Tensor, *options: Any) -> Any:
    """As `_over_classes`, compiled or not."""
    if not compiled or logits.size(0) == 1:  # the compiler takes a size of one for a constant
        return _over_classes(logits, target, mean_logits, *options)
    for tensor in (logits, target, mean_logits):
        mark_dynamic(tensor, 0)
    return _compiled_over_classes()(logits, target, mean_logits, *options)


def _over_rows_in_cache(compiled: bool, logits: Tensor, target: Tensor, mean_logits: Tensor, *options: Any) -> Any:
    """As `_over_rows`, a few rows at a time, whose gradient takes the place of their logits."""
    num_rows = max(1, round(_CACHED_LOGITS * torch.get_num_threads() / logits.size(1)))
    columns, difference = [], None
    for start in range(0, logits.size(0), num_rows):
        rows = slice(start, start + num_rows)
        part = logits[rows].to(mean_logits.dtype)
        *results, difference = _over_rows(compiled, part, target[rows], mean_logits[rows], *options)
        columns.append(results)
        if difference is not None:
            logits[rows] = difference
    return *(torch.cat(column) for column in zip(*columns, strict=True)), difference if difference is None else logits


@cache
def _compiled_over_classes() -> Any:
    return torch.compile(_over_classes, fullgraph=True)
