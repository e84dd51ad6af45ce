"""Label-smoothed cross-entropy, fused with the output projection (sections 3.4 and 5.4).

The smoothed target assigns epsilon / V to each of the V classes and adds 1 - epsilon to the right one. This is the
definition of PyTorch and OpenNMT. fairseq distributes epsilon over the V - 1 wrong classes and tensor2tensor subtracts
a constant, so their losses differ slightly from these.

A batch of 25,000 tokens with 37,000 pieces has 0.9 billion logits. They are never in memory at once: the forward pass
projects a chunk of rows at a time and computes its gradients immediately, and the backward pass only scales them.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from model.torch_private import mark_dynamic

_CHUNK_LOGITS = {"cpu": 1 << 24, "cuda": 1 << 26}
"""Logits per chunk: enough for efficient products on a CPU, and enough to keep a GPU busy (0.7 GB)."""
_CACHED_LOGITS = 1 << 18
"""Logits per thread that a CPU processes at a time after the product, so that they stay in its cache."""


class _Options(NamedTuple):
    epsilon: float
    """The label smoothing."""
    ignored_id: int
    product_dtype: torch.dtype
    with_gradient: bool
    compiled: bool


class LossSums(NamedTuple):
    """Sums over the target tokens of a micro-batch: scalars in float32, or in float64 for float64 states."""

    smoothed: Tensor
    """Label-smoothed cross-entropy, the training loss. The other fields carry no gradients."""
    negative_log_likelihood: Tensor
    """Cross-entropy without smoothing. The exponential of its mean is the perplexity."""
    num_correct: Tensor
    """How often the right class is the most probable one. Ties count as correct; they occur in bfloat16."""


def label_smoothed_loss(
    states: Tensor, weight: Tensor, targets: Tensor, label_smoothing: float, ignored_id: int, compiled: bool = False
) -> LossSums:
    """Compute sums of the loss over all positions whose target is not `ignored_id`.

    Products run in autocast's dtype if it is enabled; softmax, logarithms and sums in float32 or float64.

    Args:
        states: decoder states [..., D].
        weight: output projection [V, D].
        targets: integers [...], the pieces to predict.
        label_smoothing: epsilon in [0, 1).
        ignored_id: id of the padding symbol.
        compiled: process the logits with compiled kernels. On a GPU they read and write the logits a third as often.
    """
    device = states.device.type
    product_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype
    # Decide here whether to compute gradients: they are always disabled inside `forward`, and a parameter requires
    # them even under inference_mode.
    with_gradient = torch.is_grad_enabled() and (states.requires_grad or weight.requires_grad)
    states, targets = states.reshape(-1, states.size(-1)), targets.reshape(-1).long()
    options = _Options(label_smoothing, ignored_id, product_dtype, with_gradient, compiled)
    return LossSums(*_FusedLoss.apply(states, weight, targets, options))


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        targets: Tensor,
        options: _Options,
    ) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(states.device.type, enabled=False):
            return _forward(ctx, states, weight, targets, options)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grad_states, grad_weight = ctx.saved_tensors
        scale = gradients[0]
        return (
            grad_states * scale.to(grad_states.dtype) if grad_states is not None else None,
            grad_weight * scale.to(grad_weight.dtype) if grad_weight is not None else None,
            None,
            None,
        )


def _forward(
    ctx: Any, states: Tensor, weight: Tensor, targets: Tensor, options: _Options
) -> tuple[Tensor, Tensor, Tensor]:
    epsilon, ignored_id, product_dtype, with_gradient, compiled = options
    num_rows, vocabulary_size = states.size(0), weight.size(0)
    sum_dtype = torch.promote_types(states.dtype, torch.float32)
    projection = weight.to(product_dtype)
    # The smoothing term needs each row's sum of logits. sum_v h . w_v is h . (sum_v w_v), so it needs no pass over the
    # logits. Its gradient, the same for every class, needs none either.
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
        del logits, difference  # free them before the next chunk allocates its own
    if grad_states is not None and grad_weight is not None:
        grad_weight -= kept_states_sum * (epsilon / vocabulary_size)
        ctx.save_for_backward(grad_states, grad_weight.to(weight.dtype))
    ctx.mark_non_differentiable(likelihood, num_correct)
    ctx.set_materialize_grads(False)
    return smoothed, likelihood, num_correct


def _over_classes(
    logits: Tensor, target: Tensor, mean_logits: Tensor, epsilon: float, ignored_id: int, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Compute everything that reads a chunk of logits.

    Args:
        logits: products of states and weights [rows, V].
        target: int64 [rows, 1].
        mean_logits: mean of the logits over the classes [rows, 1], in the dtype of the sums.
        epsilon: the label smoothing.
        ignored_id: id of the padding symbol.
        with_gradient: compute the last result, which is None otherwise.

    Returns:
        Five tensors. The first four are [rows, 1]: 1 for a token and 0 for padding; the target's negative
        log-likelihood; the mean of all classes' negative log-likelihoods; whether the target is the most probable
        class. The last one is d smoothed / d logits [rows, V] without its term -epsilon / V.
    """
    sum_dtype = mean_logits.dtype
    kept = (target != ignored_id).to(sum_dtype)
    probabilities = torch.softmax(logits, -1, dtype=sum_dtype)
    # The largest probability is at least 1 / V, so its logarithm is finite.
    largest, target_logits = logits.amax(-1, keepdim=True), logits.gather(1, target)
    log_normalizer = largest.to(sum_dtype) - probabilities.amax(-1, keepdim=True).log()
    difference: Tensor | None = None
    if with_gradient:
        # d loss / d logits = p - (1 - epsilon) onehot - epsilon / V. `_forward` adds the last term.
        if torch.compiler.is_compiling():
            is_target = torch.arange(logits.size(1), device=logits.device) == target  # fused, so not stored
            difference = (probabilities + is_target * (epsilon - 1.0)).to(logits.dtype)
        else:
            probabilities.scatter_add_(1, target, kept.new_full(target.shape, epsilon - 1.0))
            difference = probabilities.to(logits.dtype)
    target_loss = log_normalizer - target_logits.to(sum_dtype)
    return kept, target_loss, log_normalizer - mean_logits, target_logits == largest, difference


def _over_rows(compiled: bool, logits: Tensor, target: Tensor, mean_logits: Tensor, *options: Any) -> Any:
    """Call `_over_classes`, compiled or not."""
    if not compiled or logits.size(0) == 1:  # the compiler treats a size of 1 as a constant
        return _over_classes(logits, target, mean_logits, *options)
    for tensor in (logits, target, mean_logits):
        mark_dynamic(tensor, 0)
    return _compiled_over_classes()(logits, target, mean_logits, *options)


def _over_rows_in_cache(compiled: bool, logits: Tensor, target: Tensor, mean_logits: Tensor, *options: Any) -> Any:
    """Call `_over_rows` for a few rows at a time, and overwrite their logits with the gradient."""
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
