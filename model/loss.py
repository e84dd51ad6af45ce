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
    target = targets.unsqueeze(1)
    kept = (target != ignored_id).to(sum_dtype)
    # Rows that are not kept are 0, so they add nothing to the gradient of the weight.
    kept_states = states.to(sum_dtype) * kept
    product_states = kept_states.to(product_dtype)
    mean_logits = (kept_states @ weight_sum).unsqueeze(1) / vocabulary_size
    kept_states_sum = kept_states.sum(0)
    del kept_states
    grad_states = torch.empty_like(product_states) if with_gradient else None
    grad_weight = torch.zeros_like(weight, dtype=sum_dtype) if with_gradient else None

    # Only what reads logits is in this loop: each operation here is many kernels of a GPU.
    over_rows = _over_rows_in_cache if states.device.type == "cpu" else _over_rows
    chunk_rows = max(1, _CHUNK_LOGITS.get(states.device.type, 1 << 24) // vocabulary_size)
    columns = []
    for start in range(0, num_rows, chunk_rows):
        rows = slice(start, min(start + chunk_rows, num_rows))
        logits = product_states[rows] @ projection.t()
        *results, difference = over_rows(compiled, logits, target[rows], sum_dtype, epsilon, with_gradient)
        columns.append(results)
        if grad_states is not None and grad_weight is not None and difference is not None:
            torch.mm(difference, projection, out=grad_states[rows])
            grad_weight += difference.t() @ product_states[rows]
        del logits, difference  # free them before the next chunk allocates its own
    largest, target_logits, most_probable = (torch.cat(column) for column in zip(*columns, strict=True))
    # The largest probability is at least 1 / V, so its logarithm is finite.
    log_normalizer = largest.to(sum_dtype) - most_probable.log()
    target_loss, mean_loss = log_normalizer - target_logits, log_normalizer - mean_logits
    if grad_states is not None and grad_weight is not None:
        mean_gradient = weight_sum * (epsilon / vocabulary_size)
        grad_weight -= kept_states_sum * (epsilon / vocabulary_size)
        ctx.save_for_backward(
            ((grad_states.to(sum_dtype) - mean_gradient) * kept).to(states.dtype), grad_weight.to(weight.dtype)
        )
    smoothed = (((1.0 - epsilon) * target_loss + epsilon * mean_loss) * kept).sum()
    likelihood, num_correct = (target_loss * kept).sum(), ((target_logits == largest) * kept).sum()
    ctx.mark_non_differentiable(likelihood, num_correct)
    ctx.set_materialize_grads(False)
    return smoothed, likelihood, num_correct


def _over_classes(
    logits: Tensor, target: Tensor, sum_dtype: torch.dtype, epsilon: float, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute everything that reads a chunk of logits.

    Args:
        logits: products of states and weights [rows, V].
        target: int64 [rows, 1].
        sum_dtype: dtype of the probabilities.
        epsilon: the label smoothing.
        with_gradient: compute the last result, which is None otherwise.

    Returns:
        Four tensors. The first three are [rows, 1]: the largest logit, the target's logit, and the probability of the
        most probable class. The last one is d smoothed / d logits [rows, V] without its term -epsilon / V.
    """
    probabilities = torch.softmax(logits, -1, dtype=sum_dtype)
    largest, target_logits = logits.amax(-1, keepdim=True), logits.gather(1, target)
    most_probable = probabilities.amax(-1, keepdim=True)
    difference: Tensor | None = None
    if with_gradient:
        # d loss / d logits = p - (1 - epsilon) onehot - epsilon / V. `_forward` adds the last term.
        if torch.compiler.is_compiling():
            is_target = torch.arange(logits.size(1), device=logits.device) == target  # fused, so not stored
            difference = (probabilities + is_target * (epsilon - 1.0)).to(logits.dtype)
        else:
            probabilities.scatter_add_(1, target, probabilities.new_full(target.shape, epsilon - 1.0))
            difference = probabilities.to(logits.dtype)
    return largest, target_logits, most_probable, difference


def _over_rows(compiled: bool, logits: Tensor, target: Tensor, *options: Any) -> Any:
    """Call `_over_classes`, compiled or not."""
    if not compiled or logits.size(0) == 1:  # the compiler treats a size of 1 as a constant
        return _over_classes(logits, target, *options)
    for tensor in (logits, target):
        mark_dynamic(tensor, 0)
    return _compiled_over_classes()(logits, target, *options)


def _over_rows_in_cache(compiled: bool, logits: Tensor, target: Tensor, sum_dtype: torch.dtype, *options: Any) -> Any:
    """Call `_over_rows` for a few rows at a time, and overwrite their logits with the gradient."""
    num_rows = max(1, round(_CACHED_LOGITS * torch.get_num_threads() / logits.size(1)))
    columns, difference = [], None
    for start in range(0, logits.size(0), num_rows):
        rows = slice(start, start + num_rows)
        part = logits[rows].to(sum_dtype)
        *results, difference = _over_rows(compiled, part, target[rows], sum_dtype, *options)
        columns.append(results)
        if difference is not None:
            logits[rows] = difference
    return *(torch.cat(column) for column in zip(*columns, strict=True)), difference if difference is None else logits


@cache
def _compiled_over_classes() -> Any:
    return torch.compile(_over_classes, fullgraph=True)
