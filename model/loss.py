"""Label-smoothed cross-entropy, fused with the output projection (sections 3.4 and 5.4).

The smoothed target assigns epsilon / V to each of the V classes and adds 1 - epsilon to the right one. This is the
definition of PyTorch and OpenNMT. fairseq distributes epsilon over the V - 1 wrong classes and tensor2tensor subtracts
a constant, so their losses differ slightly from these.

A batch of 25,000 tokens with 37,000 pieces has 0.9 billion logits. They are never in memory at once: the forward pass
projects a chunk of rows at a time and computes its gradients immediately, and the backward pass only scales them.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

_CHUNK_LOGITS = 1 << 24
"""Logits per chunk on a CPU, enough for efficient products."""
_CHUNK_SHARE = 1 / 64
"""Share of a GPU's memory that a chunk may take, with all that is computed from it.

Fewer chunks add fewer times to the gradient of the weight. This is a share of all memory and not of what is free, so
that a resumed run adds in the same order."""
_CHUNK_ROWS = 128
"""A chunk on a GPU has a multiple of this many rows, for efficient products."""
_CACHED_LOGITS = 1 << 18
"""Logits per thread that a CPU processes at a time after the product, so that they stay in its cache."""


class _Options(NamedTuple):
    epsilon: float
    """The label smoothing."""
    ignored_id: int
    product_dtype: torch.dtype
    with_gradient: bool
    scale: Tensor | float | None
    kernels: str


class LossSums(NamedTuple):
    """Sums over the target tokens of a micro-batch: scalars in float32, or in float64 for float64 states."""

    smoothed: Tensor
    """Label-smoothed cross-entropy, the training loss, times `scale`. The other fields carry no gradients."""
    negative_log_likelihood: Tensor
    """Cross-entropy without smoothing. The exponential of its mean is the perplexity."""
    num_correct: Tensor
    """How often the right class is the most probable one. Ties count as correct; they occur in bfloat16."""


def label_smoothed_loss(
    states: Tensor,
    weight: Tensor,
    targets: Tensor,
    label_smoothing: float,
    ignored_id: int,
    scale: Tensor | float | None = None,
    kernels: str = "pytorch",
) -> LossSums:
    """Compute sums of the loss over all positions whose target is not `ignored_id`.

    Products run in autocast's dtype if it is enabled; softmax, logarithms and sums in float32 or float64.

    Args:
        states: decoder states [..., D].
        weight: output projection [V, D].
        targets: integers [...], the pieces to predict.
        label_smoothing: epsilon in [0, 1).
        ignored_id: id of the padding symbol.
        scale: factor on `smoothed`. If it is given, `backward` must be called on `smoothed` itself: gradients are
            multiplied by the factor while they are computed, and not by the gradient of `smoothed`, which is 1.
        kernels: "triton" or "pytorch", for what reads logits. With Triton's kernel a chunk of logits is read twice and
            written once.
    """
    device = states.device.type
    product_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype
    # Decide here whether to compute gradients: they are always disabled inside `forward`, and a parameter requires
    # them even under inference_mode.
    with_gradient = torch.is_grad_enabled() and (states.requires_grad or weight.requires_grad)
    states, targets = states.reshape(-1, states.size(-1)), targets.reshape(-1).long()
    options = _Options(label_smoothing, ignored_id, product_dtype, with_gradient, scale, kernels)
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
            ctx.is_scaled = options.scale is not None
            return _forward(ctx, states, weight, targets, options)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grad_states, grad_weight = ctx.saved_tensors
        if not ctx.is_scaled:
            scale = gradients[0]
            grad_states, grad_weight = grad_states * scale.to(grad_states.dtype), grad_weight * scale
        return grad_states, grad_weight, None, None


def _forward(
    ctx: Any, states: Tensor, weight: Tensor, targets: Tensor, options: _Options
) -> tuple[Tensor, Tensor, Tensor]:
    epsilon, ignored_id, product_dtype, with_gradient, scale, kernels = options
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
    if scale is not None:
        # Not in place: without autocast `product_states` is the same tensor.
        kept_states = kept_states * scale
    kept_states_sum = kept_states.sum(0)
    weighted_states = product_states if scale is None else kept_states.to(product_dtype)
    del kept_states
    grad_states = torch.empty_like(product_states) if with_gradient else None
    grad_weight = torch.zeros_like(weight, dtype=sum_dtype) if with_gradient else None

    # Only what reads logits is in this loop: each operation here is many kernels of a GPU.
    over_classes = _choose_kernel(states.device, kernels)
    chunk_rows = _chunk_rows(num_rows, vocabulary_size, states.device, product_dtype, kernels)
    columns = []
    for start in range(0, num_rows, chunk_rows):
        rows = slice(start, min(start + chunk_rows, num_rows))
        logits = product_states[rows] @ projection.t()
        *results, difference = over_classes(logits, target[rows], sum_dtype, epsilon, with_gradient)
        columns.append(results)
        if grad_states is not None and grad_weight is not None and difference is not None:
            torch.mm(difference, projection, out=grad_states[rows])
            _add_product(grad_weight, difference.t(), weighted_states[rows])
        del logits, difference  # free them before the next chunk allocates its own
    largest, target_logits, most_probable = (torch.cat(column) for column in zip(*columns, strict=True))
    # The largest probability is at least 1 / V, so its logarithm is finite.
    log_normalizer = largest.to(sum_dtype) - most_probable.log()
    target_loss, mean_loss = log_normalizer - target_logits, log_normalizer - mean_logits
    smoothed = (((1.0 - epsilon) * target_loss + epsilon * mean_loss) * kept).sum()
    likelihood, num_correct = (target_loss * kept).sum(), ((target_logits == largest) * kept).sum()
    if scale is not None:
        smoothed, kept = smoothed * scale, kept * scale
    if grad_states is not None and grad_weight is not None:
        mean_gradient = weight_sum * (epsilon / vocabulary_size)
        grad_weight -= kept_states_sum * (epsilon / vocabulary_size)
        ctx.save_for_backward(
            ((grad_states.to(sum_dtype) - mean_gradient) * kept).to(states.dtype), grad_weight.to(weight.dtype)
        )
    ctx.mark_non_differentiable(likelihood, num_correct)
    ctx.set_materialize_grads(False)
    return smoothed, likelihood, num_correct


def _chunk_rows(
    num_rows: int, vocabulary_size: int, device: torch.device, product_dtype: torch.dtype, kernels: str
) -> int:
    """Return the number of rows of a chunk, such that chunks have about the same number."""
    if device.type != "cuda":
        return max(1, _CHUNK_LOGITS // vocabulary_size)
    # Without Triton's kernel there are probabilities and the gradient beside the logits.
    bytes_per_logit = product_dtype.itemsize if kernels == "triton" else 2 * product_dtype.itemsize + 4
    most = _CHUNK_SHARE * torch.cuda.get_device_properties(device).total_memory / (bytes_per_logit * vocabulary_size)
    num_chunks = math.ceil(num_rows / max(most, _CHUNK_ROWS))
    return math.ceil(num_rows / num_chunks / _CHUNK_ROWS) * _CHUNK_ROWS


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add the product a @ b to a float32 matrix."""
    if total.device.type == "cuda" and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def _choose_kernel(device: torch.device, kernels: str) -> Any:
    """Return a function with the arguments and results of `_over_classes`. It may overwrite the logits."""
    if device.type == "cpu":
        return _over_classes_in_cache
    if kernels == "triton":
        # A machine without a GPU may not have Triton.
        from model.gpu.loss_kernel import over_classes

        return over_classes
    return _over_classes


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
        probabilities.scatter_add_(1, target, probabilities.new_full(target.shape, epsilon - 1.0))
        difference = probabilities.to(logits.dtype)
    return largest, target_logits, most_probable, difference


def _over_classes_in_cache(logits: Tensor, target: Tensor, sum_dtype: torch.dtype, *options: Any) -> Any:
    """Call `_over_classes` for a few rows at a time, and overwrite their logits with the gradient."""
    num_rows = max(1, round(_CACHED_LOGITS * torch.get_num_threads() / logits.size(1)))
    columns, difference = [], None
    for start in range(0, logits.size(0), num_rows):
        rows = slice(start, start + num_rows)
        *results, difference = _over_classes(logits[rows].to(sum_dtype), target[rows], sum_dtype, *options)
        columns.append(results)
        if difference is not None:
            logits[rows] = difference
    return *(torch.cat(column) for column in zip(*columns, strict=True)), difference if difference is None else logits
