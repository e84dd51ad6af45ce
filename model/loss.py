"""Label-smoothed cross-entropy, fused with the output projection (sections 3.4 and 5.4).

The smoothed target assigns epsilon / V to each of the V classes and adds 1 - epsilon to the right one. This is the
definition of PyTorch and OpenNMT. fairseq distributes epsilon over the V - 1 wrong classes and tensor2tensor subtracts
a constant, so their losses differ slightly from these.

A batch of 25,000 tokens with 37,000 pieces has 0.9 billion logits. They are never in memory at once: the forward pass
projects a chunk of rows at a time and computes its gradients immediately, and the backward pass only scales them.

R-Drop (Liang et al. 2021, https://arxiv.org/abs/2106.14448, equation 4) adds a divergence between two passes P and Q
over the same tokens with other dropout: loss(P) + loss(Q) + alpha * (KL(P || Q) + KL(Q || P)) / 2. Here it is half of
that, so that the size of loss and gradient is that of a single pass.
"""

import math
from collections.abc import Iterator
from functools import partial
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
    alpha: float
    """Weight of the divergence between two passes; 0 for one pass."""


class LossSums(NamedTuple):
    """Sums over the target tokens of a micro-batch: scalars in float32, or in float64 for float64 states."""

    smoothed: Tensor
    """The training loss: label-smoothed cross-entropy, and R-Drop's divergence if there is one, times `scale`.

    The other fields carry no gradients. Of two passes they are the mean."""
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
    r_drop_alpha: float = 0.0,
) -> LossSums:
    """Compute sums of the loss over all positions whose target is not `ignored_id`.

    Products run in autocast's dtype if it is enabled; softmax, logarithms and sums in float32 or float64.

    Args:
        states: decoder states [..., D]; for R-Drop those of two passes [2, ..., D].
        weight: output projection [V, D].
        targets: integers [...], the pieces to predict.
        label_smoothing: epsilon in [0, 1).
        ignored_id: id of the padding symbol.
        scale: factor on `smoothed`. If it is given, `backward` must be called on `smoothed` itself: gradients are
            multiplied by the factor while they are computed, and not by the gradient of `smoothed`, which is 1.
        kernels: "triton" or "pytorch", for what reads logits. With Triton's kernel a chunk of logits is read twice and
            written once.
        r_drop_alpha: weight of the divergence between two passes; 0 for one pass.
    """
    device = states.device.type
    product_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype
    # Decide here whether to compute gradients: they are always disabled inside `forward`, and a parameter requires
    # them even under inference_mode.
    with_gradient = torch.is_grad_enabled() and (states.requires_grad or weight.requires_grad)
    states, targets = states.reshape(-1, states.size(-1)), targets.reshape(-1).long()
    options = _Options(label_smoothing, ignored_id, product_dtype, with_gradient, scale, kernels, r_drop_alpha)
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
    epsilon, ignored_id, product_dtype, with_gradient, scale = options[:5]
    vocabulary_size, passes = weight.size(0), 2 if options.alpha else 1
    sum_dtype = torch.promote_types(states.dtype, torch.float32)
    projection = weight.to(product_dtype)
    # The smoothing term needs each row's sum of logits. sum_v h . w_v is h . (sum_v w_v), so it needs no pass over the
    # logits. Its gradient, the same for every class, needs none either.
    weight_sum = weight.to(sum_dtype).sum(0)
    target = targets.unsqueeze(1)
    kept = (target != ignored_id).to(sum_dtype).repeat(passes, 1)
    # Rows that are not kept are 0, so they add nothing to the gradient of the weight.
    kept_states = states.to(sum_dtype) * kept
    product_states = kept_states.to(product_dtype)
    mean_logits = (kept_states @ weight_sum).unsqueeze(1) / vocabulary_size
    # The factor on each row's loss.
    factor = scale if passes == 1 else (1.0 if scale is None else scale) / passes
    if factor is not None:
        # Not in place: without autocast `product_states` is the same tensor.
        kept_states = kept_states * factor
    kept_states_sum = kept_states.sum(0)
    weighted_states = product_states if factor is None else kept_states.to(product_dtype)
    del kept_states
    grad_states = torch.empty_like(product_states) if with_gradient else None
    grad_weight = torch.zeros_like(weight, dtype=sum_dtype) if with_gradient else None

    # Only what reads logits is in this loop: each operation here is many kernels of a GPU.
    columns: list[list[Tensor]] = []
    for parts, own_target in _chunks(target, passes, vocabulary_size, options):
        logits = [product_states[rows] @ projection.t() for rows in parts]
        results, differences = _over_classes_of(logits, own_target, sum_dtype, options)
        columns.append(results)
        if grad_states is not None and grad_weight is not None:
            for rows, difference in zip(parts, differences, strict=True):
                torch.mm(difference, projection, out=grad_states[rows])
                _add_product(grad_weight, difference.t(), weighted_states[rows])
        del logits, differences  # free them before the next chunk allocates its own
    by_pass = [torch.cat(column) for column in zip(*columns, strict=True)]
    largest, target_logits, most_probable = (torch.cat(by_pass[first : 3 * passes : 3]) for first in range(3))
    # The largest probability is at least 1 / V, so its logarithm is finite.
    log_normalizer = largest.to(sum_dtype) - most_probable.log()
    target_loss, mean_loss = log_normalizer - target_logits, log_normalizer - mean_logits
    smoothed = (((1.0 - epsilon) * target_loss + epsilon * mean_loss) * kept).sum()
    if options.alpha:
        smoothed = smoothed + options.alpha * (by_pass[-1] * kept[: len(target)]).sum()
    likelihood, num_correct = (target_loss * kept).sum() / passes, ((target_logits == largest) * kept).sum() / passes
    if factor is not None:
        smoothed, kept = smoothed * factor, kept * factor
    if grad_states is not None and grad_weight is not None:
        mean_gradient = weight_sum * (epsilon / vocabulary_size)
        grad_weight -= kept_states_sum * (epsilon / vocabulary_size)
        ctx.save_for_backward(
            ((grad_states.to(sum_dtype) - mean_gradient) * kept).to(states.dtype), grad_weight.to(weight.dtype)
        )
    ctx.mark_non_differentiable(likelihood, num_correct)
    ctx.set_materialize_grads(False)
    return smoothed, likelihood, num_correct


def _chunks(
    target: Tensor, passes: int, vocabulary_size: int, options: _Options
) -> Iterator[tuple[list[slice], Tensor]]:
    """Yield the rows of each chunk, a slice a pass, and their targets."""
    num_rows = target.size(0)
    chunk_rows = _chunk_rows(num_rows, vocabulary_size, target.device, options.product_dtype, options.kernels, passes)
    for start in range(0, num_rows, chunk_rows):
        rows = slice(start, min(start + chunk_rows, num_rows))
        yield [slice(first + rows.start, first + rows.stop) for first in (0, num_rows)[:passes]], target[rows]


def _over_classes_of(
    logits: list[Tensor], target: Tensor, sum_dtype: torch.dtype, options: _Options
) -> tuple[list[Tensor], list[Tensor]]:
    """Compute everything that reads a chunk of logits of one or two passes, which may be overwritten.

    Returns:
        Three results of `_over_classes` for each pass and, of two passes, the divergence [rows, 1]; and the gradients
        of the logits, a tensor a pass, or none.
    """
    epsilon, with_gradient, alpha = options.epsilon, options.with_gradient, options.alpha
    kernel: Any
    if options.kernels == "triton" and target.device.type != "cpu":
        # A machine without a GPU may not have Triton.
        from model.gpu import loss_kernel

        kernel = loss_kernel.over_class_pairs if alpha else loss_kernel.over_classes
    else:
        kernel = _over_class_pairs if alpha else _over_classes
        if target.device.type == "cpu":
            kernel = partial(_in_cache, kernel)
    last = (alpha,) if alpha else ()
    found = kernel(*logits, target, sum_dtype, epsilon, with_gradient, *last)
    num_gradients = len(logits)
    gradients = [one for one in found[-num_gradients:] if one is not None]
    return list(found[:-num_gradients]), gradients


def _chunk_rows(
    num_rows: int, vocabulary_size: int, device: torch.device, product_dtype: torch.dtype, kernels: str, passes: int = 1
) -> int:
    """Return the number of rows of a chunk, such that chunks have about the same number."""
    itemsize = product_dtype.itemsize
    if device.type != "cuda":
        return max(1, _CHUNK_LOGITS // (passes * vocabulary_size))
    # Without Triton's kernel there are probabilities and the gradient beside the logits, and several tensors of their
    # size for a divergence.
    bytes_per_logit = passes * itemsize
    if kernels != "triton":
        bytes_per_logit = 2 * itemsize + 4 if passes == 1 else 4 * itemsize + 28
    most = _CHUNK_SHARE * torch.cuda.get_device_properties(device).total_memory / (bytes_per_logit * vocabulary_size)
    num_chunks = math.ceil(num_rows / max(most, _CHUNK_ROWS))
    return math.ceil(num_rows / num_chunks / _CHUNK_ROWS) * _CHUNK_ROWS


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add the product a @ b to a float32 matrix."""
    if total.device.type == "cuda" and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


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


def _over_class_pairs(
    logits: Tensor, others: Tensor, target: Tensor, sum_dtype: torch.dtype, epsilon: float, with_gradient: bool,
    alpha: float,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Compute everything that reads a chunk of logits of two passes.

    Args:
        logits: those of the first pass [rows, V].
        others: those of the second pass [rows, V].
        target: int64 [rows, 1].
        sum_dtype: dtype of the probabilities.
        epsilon: the label smoothing.
        with_gradient: compute the last two results, which are None otherwise.
        alpha: weight of the divergence.

    Returns:
        The first three results of `_over_classes` for the first pass and for the second one; the divergence
        (KL(P || Q) + KL(Q || P)) / 2 [rows, 1]; and the gradients of `logits` and `others` [rows, V], where that of
        the divergence is added to those of `_over_classes`.
    """
    results = []
    log_p, log_q = (torch.log_softmax(one, -1, dtype=sum_dtype) for one in (logits, others))
    p, q = log_p.exp(), log_q.exp()
    for one, probabilities in ((logits, p), (others, q)):
        results += [one.amax(-1, keepdim=True), one.gather(1, target), probabilities.amax(-1, keepdim=True)]
    ratio = log_p.sub_(log_q)
    divergences = (p * ratio).sum(-1, keepdim=True), -(q * ratio).sum(-1, keepdim=True)
    gradients: list[Tensor | None] = [None, None]
    if with_gradient:
        # d KL(P || Q) is p * (ratio - KL(P || Q)) by P's logits and q - p by Q's.
        difference = p - q
        for number, (own, sign) in enumerate(((p, 1.0), (q, -1.0))):
            gradient = ratio.mul(sign).sub_(divergences[number]).mul_(own).add_(difference, alpha=sign)
            gradient = gradient.mul_(0.5 * alpha).add_(own)
            gradient.scatter_add_(1, target, gradient.new_full(target.shape, epsilon - 1.0))
            gradients[number] = gradient.to(logits.dtype)
    return *results, (divergences[0] + divergences[1]) / 2, *gradients


def _in_cache(kernel: Any, *arguments: Any) -> list[Tensor | None]:
    """Call `_over_classes` or `_over_class_pairs` for a few rows at a time; gradients overwrite the logits."""
    num_passes = 2 if kernel is _over_class_pairs else 1
    logits, (target, sum_dtype, *options) = arguments[:num_passes], arguments[num_passes:]
    # Beside logits and probabilities, a divergence needs two more tensors of their size.
    num_rows = round(_CACHED_LOGITS * torch.get_num_threads() / logits[0].size(1) / (4 if num_passes == 2 else 1))
    columns, gradients = [], [None] * num_passes
    for start in range(0, len(target), max(1, num_rows)):
        rows = slice(start, start + max(1, num_rows))
        found = kernel(*(one[rows].to(sum_dtype) for one in logits), target[rows], sum_dtype, *options)
        columns.append(found[:-num_passes])
        gradients = found[-num_passes:]
        for one, gradient in zip(logits, gradients, strict=True):
            if gradient is not None:
                one[rows] = gradient
    results = [torch.cat(column) for column in zip(*columns, strict=True)]
    return [*results, *(None if gradient is None else one for one, gradient in zip(logits, gradients, strict=True))]
