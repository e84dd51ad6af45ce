"""Label-smoothed cross-entropy, fused with the output projection (sections 3.4 and 5.4).

The smoothed target assigns epsilon / V to each of the V classes and adds 1 - epsilon to the right one. This is the
definition of PyTorch and OpenNMT. fairseq distributes epsilon over the V - 1 wrong classes and tensor2tensor subtracts
a constant, so their losses differ slightly from these.

A batch of 25,000 tokens with a vocabulary of 37,000 pieces has 0.9 billion logits. They are never in memory at once:
the forward pass projects a chunk of tokens at a time and computes its gradients immediately; the backward pass only
scales them.

R-Drop (Liang et al. 2021, https://arxiv.org/abs/2106.14448, equation 4) adds a divergence between two passes P and Q
over the same tokens with different dropout: loss(P) + loss(Q) + alpha * (KL(P || Q) + KL(Q || P)) / 2. This module
computes half of that, so that loss and gradient have the size of a single pass.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor


def plain_loss(states: Tensor, weight: Tensor, targets: Tensor, label_smoothing: float, ignored_id: int) -> Tensor:
    """Return the loss by its formula, from all logits at once: what `label_smoothed_loss` computes in chunks.

    Shapes and arguments are those of `label_smoothed_loss`.
    """
    log_probabilities = (states @ weight.T).log_softmax(-1)
    target_loss = -log_probabilities.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    mean_loss = -log_probabilities.mean(-1)
    losses = (1.0 - label_smoothing) * target_loss + label_smoothing * mean_loss
    return losses[targets != ignored_id].sum()


_CHUNK_LOGITS = 1 << 24
"""Logits per chunk on a CPU, enough for efficient products."""
_CHUNK_SHARE = 1 / 64
"""Share of a GPU's memory that a chunk may take, with all that is computed from it.

With fewer chunks, the gradient of the weight is read and written fewer times. The share is of all memory, not of free
memory, so that a resumed run adds in the same order."""
_CHUNK_MULTIPLE = 128
"""A chunk on a GPU has a multiple of this many tokens, for efficient products."""
_ALIGNED_CLASSES, _PADDED_CLASSES = 8, 64
"""If V is no multiple of the first number, rows of 16-bit logits do not begin at multiples of 16 bytes. They are then
padded to a multiple of the second number, if the functions of the loss allow it."""
_CACHED_LOGITS = 1 << 18
"""Logits that each thread of a CPU processes at a time after the product, so that they stay in its cache."""


class LossFunctions(NamedTuple):
    """An implementation of the part of the loss that reads logits: one function for one pass, one for two (R-Drop)."""

    name: str
    read_logits: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]]
    """Has the signature of `read_logits`. It may overwrite the logits."""
    read_logit_pairs: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]]
    """Has the signature of `read_logit_pairs`. It may overwrite the logits."""
    in_place: bool
    """Whether the gradient takes the place of the logits, so that a chunk needs no other memory."""
    allows_padding: bool = False
    """Whether the logits may be columns of a wider tensor. Its other columns are 0, and the functions leave them 0."""


class _Options(NamedTuple):
    epsilon: float
    """The label smoothing."""
    ignored_id: int
    product_dtype: torch.dtype
    with_gradient: bool
    scale: Tensor | float | None
    functions: LossFunctions
    alpha: float
    """Weight of the divergence between two passes; 0 for one pass."""


class LossSums(NamedTuple):
    """Sums over the target tokens of a micro-batch: scalars in float32, or in float64 for float64 states."""

    smoothed: Tensor
    """The training loss: label-smoothed cross-entropy, and R-Drop's divergence if there is one, times `scale`.

    The other fields carry no gradients. For two passes they are the means of both."""
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
    functions: LossFunctions | None = None,
    r_drop_alpha: float = 0.0,
) -> LossSums:
    """Compute sums of the loss over all positions whose target is not `ignored_id`.

    `smoothed` is `plain_loss`, computed in chunks.

    Products run in autocast's dtype if it is enabled; softmax, logarithms and sums in float32 or float64.

    Args:
        states: decoder states [..., D]; for R-Drop those of two passes [2, ..., D].
        weight: output projection [V, D].
        targets: integers [...], the pieces to predict.
        label_smoothing: epsilon in [0, 1).
        ignored_id: id of the padding symbol.
        scale: factor on `smoothed`. If it is given, `backward` must be called on `smoothed` itself, because gradients
            are multiplied by this factor alone, while they are computed, so that `backward` does not multiply them.
        functions: the functions that read logits; None for PyTorch's operators.
        r_drop_alpha: weight of the divergence between two passes; 0 for one pass.
    """
    device = states.device.type
    product_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype
    # Decided here, because gradients are always disabled inside `_FusedLoss.forward`. A parameter requires gradients
    # even under inference_mode.
    with_gradient = torch.is_grad_enabled() and (states.requires_grad or weight.requires_grad)
    if r_drop_alpha:
        # The tokens of both passes alternate, so that a chunk has both passes of each of its tokens.
        states, targets = states.movedim(0, -2), targets.reshape(-1, 1).expand(-1, 2)
    states, targets = states.reshape(-1, states.size(-1)), targets.reshape(-1).long().contiguous()
    options = _Options(
        label_smoothing, ignored_id, product_dtype, with_gradient, scale, functions or PYTORCH_LOSS, r_drop_alpha
    )
    return LossSums(*_FusedLoss.apply(states, weight, targets, options))


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, targets: Tensor, options: _Options
    ) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(states.device.type, enabled=False):
            ctx.is_scaled = options.scale is not None
            return _forward(ctx, states, weight, targets, options)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grad_states, grad_weight = ctx.saved_tensors
        # With a scale, the saved gradients already have it, and gradients[0] is 1; see `label_smoothed_loss`.
        if not ctx.is_scaled:
            scale = gradients[0]
            grad_states, grad_weight = grad_states * scale.to(grad_states.dtype), grad_weight * scale
        return grad_states, grad_weight, None, None


def _forward(
    ctx: Any, states: Tensor, weight: Tensor, targets: Tensor, options: _Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums of `LossSums`. Save in `ctx` the gradients of states and weight, times `scale` if it is given."""
    epsilon, ignored_id, product_dtype, with_gradient, scale = options[:5]
    vocabulary_size, passes = weight.size(0), 2 if options.alpha else 1
    sum_dtype = torch.promote_types(states.dtype, torch.float32)
    projection = _projection(weight, product_dtype, options.functions)
    # The smoothing term needs the sum of each token's logits. As sum_v h . w_v = h . (sum_v w_v), this reads no logits.
    # Nor does its gradient, -epsilon / V for every class, which is added after `_over_chunks`.
    weight_sum = weight.to(sum_dtype).sum(0)
    target = targets.unsqueeze(1)
    kept = (target != ignored_id).to(sum_dtype)
    # States of ignored tokens are 0, so they add nothing to the gradient of the weight.
    kept_states = states.to(sum_dtype) * kept
    product_states = kept_states.to(product_dtype)
    mean_logits = (kept_states @ weight_sum).unsqueeze(1) / vocabulary_size
    # The factor on each token's loss. The gradient of the weight gets it by way of the states, which are multiplied by
    # it here: that is cheaper than multiplying the sum over chunks.
    factor = scale if passes == 1 else (1.0 if scale is None else scale) / passes
    if factor is not None:
        # Not in place: without autocast `product_states` is the same tensor.
        kept_states = kept_states * factor
    kept_states_sum = kept_states.sum(0)
    weighted_states = product_states if factor is None else kept_states.to(product_dtype)
    del kept_states
    gradients = None
    if with_gradient:
        # The gradient of the weight adds up over chunks, in 32 bits: in bfloat16 a sum stops growing where a term is
        # below 1 / 256 of it.
        gradients = torch.empty_like(product_states), torch.zeros_like(projection, dtype=sum_dtype)
    largest, target_logits, max_probability, *divergence = _over_chunks(
        product_states, weighted_states, projection, vocabulary_size, target, sum_dtype, gradients, options
    )
    # For the logits z, max_v p_v = exp(max_v z_v) / Z, so the logarithm of the normalizer Z is the largest logit minus
    # the logarithm of the largest probability, which is finite: the largest probability is at least 1 / V.
    log_normalizer = largest.to(sum_dtype) - max_probability.log()
    # The loss of a token with target y is sum_v q_v (log Z - z_v), with q_v = epsilon / V and 1 - epsilon more for y.
    target_loss, mean_loss = log_normalizer - target_logits, log_normalizer - mean_logits
    smoothed = (((1.0 - epsilon) * target_loss + epsilon * mean_loss) * kept).sum()
    if divergence:
        smoothed = smoothed + options.alpha * (divergence[0] * kept[::2]).sum()
    likelihood, num_correct = (target_loss * kept).sum() / passes, ((target_logits == largest) * kept).sum() / passes
    token_factor = kept
    if factor is not None:
        smoothed, token_factor = smoothed * factor, kept * factor
    if gradients is not None:
        grad_states, grad_weight = gradients[0], gradients[1][:vocabulary_size]
        # The term -epsilon / V of d loss / d z is the same for all classes and tokens, so that its products with the
        # projection and with the states are multiples of the sums of their rows.
        mean_gradient = weight_sum * (epsilon / vocabulary_size)
        grad_weight -= kept_states_sum * (epsilon / vocabulary_size)
        ctx.save_for_backward(
            ((grad_states.to(sum_dtype) - mean_gradient) * token_factor).to(states.dtype), grad_weight.to(weight.dtype)
        )
    ctx.mark_non_differentiable(likelihood, num_correct)
    ctx.set_materialize_grads(False)
    return smoothed, likelihood, num_correct


def _projection(weight: Tensor, dtype: torch.dtype, functions: LossFunctions) -> Tensor:
    """Return the weight [V or more, D] in another dtype, with rows of zeros that align the products' rows."""
    vocabulary_size = weight.size(0)
    if vocabulary_size % _ALIGNED_CLASSES == 0 or not functions.allows_padding:
        return weight.to(dtype)
    width = math.ceil(vocabulary_size / _PADDED_CLASSES) * _PADDED_CLASSES
    padded = weight.new_zeros(width, weight.size(1), dtype=dtype)
    padded[:vocabulary_size] = weight
    return padded


def _over_chunks(
    states: Tensor,
    weighted_states: Tensor,
    projection: Tensor,
    vocabulary_size: int,
    target: Tensor,
    sum_dtype: torch.dtype,
    gradients: tuple[Tensor, Tensor] | None,
    options: _Options,
) -> list[Tensor]:
    """Project a chunk of tokens at a time, and call the function that reads its logits.

    Args:
        states: the states [N, D] of N tokens.
        weighted_states: the states times the factor on each token's loss.
        projection: [V or more, D].
        vocabulary_size: V.
        target: int64 [N, 1].
        sum_dtype: dtype of the probabilities and of sums.
        gradients: the gradient of the states, which is written, and that of the projection in `sum_dtype`, which is
            added to; both without the terms that come from the sum of logits. None to compute no gradients.
        options: options of the loss.

    Returns:
        The results of `read_logits` or `read_logit_pairs` except for the last one, for all tokens.
    """
    in_pairs, functions = bool(options.alpha), options.functions
    compute: Callable[..., Any] = functions.read_logit_pairs if in_pairs else functions.read_logits
    if functions is PYTORCH_LOSS and states.device.type == "cpu":
        compute = partial(_in_cache, compute)
    alpha = (options.alpha,) if in_pairs else ()
    in_place, passes = functions.in_place, 2 if in_pairs else 1
    size = _chunk_tokens(len(target), len(projection), states.device, states.dtype, in_place, passes)
    columns = []
    for start in range(0, len(target), size):
        # Only what needs logits is in this loop, since every operation is a kernel launch per chunk. Gradients are
        # computed here, since the backward pass would have to project every chunk again.
        chunk = slice(start, min(start + size, len(target)))
        product = states[chunk] @ projection.t()
        logits = product[:, :vocabulary_size]
        chunk_options = sum_dtype, options.epsilon, gradients is not None, *alpha
        *results, grad_logits = compute(logits, target[chunk], *chunk_options)
        columns.append(results)
        if gradients is not None and grad_logits is not None:
            if in_place:
                grad_logits = product  # with its columns of padding
            torch.mm(grad_logits, projection, out=gradients[0][chunk])
            _add_product(gradients[1], grad_logits.t(), weighted_states[chunk])
        del product, logits, grad_logits  # free them before the next chunk allocates its own
    return [torch.cat(column) for column in zip(*columns, strict=True)]


def _chunk_tokens(
    num_tokens: int,
    vocabulary_size: int,
    device: torch.device,
    product_dtype: torch.dtype,
    in_place: bool,
    passes: int = 1,
) -> int:
    """Return the number of rows of a chunk, one for each token of each pass, so that chunks are about equally large."""
    if device.type != "cuda":
        return max(1, _CHUNK_LOGITS // vocabulary_size // passes) * passes
    # Unless the gradient takes the place of the logits, memory holds the logits, their gradient and the probabilities,
    # and for a divergence two more tensors of the size of the probabilities.
    bytes_per_logit = product_dtype.itemsize
    if not in_place:
        bytes_per_logit = 2 * product_dtype.itemsize + 4 * (1 if passes == 1 else 3)
    most = _CHUNK_SHARE * torch.cuda.get_device_properties(device).total_memory / (bytes_per_logit * vocabulary_size)
    num_chunks = math.ceil(num_tokens / max(most, _CHUNK_MULTIPLE))
    return math.ceil(num_tokens / num_chunks / _CHUNK_MULTIPLE) * _CHUNK_MULTIPLE


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add the product a @ b to a float32 matrix."""
    if total.device.type == "cuda" and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def read_logits(
    logits: Tensor, target: Tensor, sum_dtype: torch.dtype, epsilon: float, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute all terms of the loss that depend on single logits, for a chunk of tokens.

    Args:
        logits: products of states and weights [tokens, V].
        target: int64 [tokens, 1].
        sum_dtype: dtype of the probabilities.
        epsilon: the label smoothing.
        with_gradient: whether to compute the last result, which is None otherwise.

    Returns:
        Four tensors. The first three are [tokens, 1]: the largest logit, the target's logit, and the probability of the
        most probable class. The last one is d smoothed / d logits [tokens, V] without its term -epsilon / V.
    """
    probabilities, largest, target_logits, max_probability = _probabilities(logits, target, sum_dtype)
    grad_logits: Tensor | None = None
    if with_gradient:
        # d loss / d logits = p - (1 - epsilon) onehot - epsilon / V. `_forward` adds the last term.
        probabilities.scatter_add_(1, target, probabilities.new_full(target.shape, epsilon - 1.0))
        grad_logits = probabilities.to(logits.dtype)
    return largest, target_logits, max_probability, grad_logits


def _probabilities(logits: Tensor, target: Tensor, sum_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return softmax(logits) [tokens, V], and [tokens, 1]: the largest logit, the target's, the largest probability."""
    largest = logits.amax(-1, keepdim=True)
    probabilities = torch.softmax(logits, -1, dtype=sum_dtype)
    return probabilities, largest, logits.gather(1, target), probabilities.amax(-1, keepdim=True)


def read_logit_pairs(
    logits: Tensor, target: Tensor, sum_dtype: torch.dtype, epsilon: float, with_gradient: bool, alpha: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Do what `read_logits` does for two passes over each token, P in even rows and Q in odd ones, with a divergence.

    Args:
        logits, target, sum_dtype, epsilon, with_gradient: see `read_logits`; there are two rows for each token.
        alpha: weight of the divergence.

    Returns:
        The first three results of `read_logits`; the divergence (KL(P || Q) + KL(Q || P)) / 2 [tokens, 1]; and the last
        result of `read_logits`, to which the gradient of alpha times the divergence is added.
    """
    probabilities, largest, target_logits, max_probability = _probabilities(logits, target, sum_dtype)
    # log(P / Q) is the difference of the logits plus a constant for each token. The constant is left out, because it
    # cancels: KL(Q || P) has it with the other sign, and the gradient has log(P / Q) - KL(P || Q).
    half = 0.5 * alpha
    difference = (logits[::2].to(sum_dtype) - logits[1::2]).mul_(half)
    gradient, divergences = torch.empty_like(probabilities), []
    for first in (0, 1):
        if first:
            difference.neg_()
        own, other, part = probabilities[first::2], probabilities[1 - first :: 2], gradient[first::2]
        torch.mul(own, difference, out=part)
        divergence = part.sum(-1, keepdim=True) / half  # KL(own || other) without the constant
        divergences.append(divergence)
        # d KL(own || other) is own * (log(own / other) - KL) by own's logits, and other - own by other's. With the
        # gradient of the cross-entropy: own * (1 + half + half * (log(own / other) - KL)) - half * other.
        part.addcmul_(own, 1.0 + half - half * divergence).sub_(other, alpha=half)
    mean = (divergences[0] + divergences[1]) / 2
    if not with_gradient:
        return largest, target_logits, max_probability, mean, None
    gradient.scatter_add_(1, target, gradient.new_full(target.shape, epsilon - 1.0))
    return largest, target_logits, max_probability, mean, gradient.to(logits.dtype)


PYTORCH_LOSS = LossFunctions("PyTorch", read_logits, read_logit_pairs, in_place=False)


def _in_cache(
    function: Callable[..., Any], logits: Tensor, target: Tensor, sum_dtype: torch.dtype, *options: Any
) -> Any:
    """Call `read_logits` or `read_logit_pairs` for a few tokens at a time, and overwrite their logits."""
    num_tokens = max(1, round(_CACHED_LOGITS * torch.get_num_threads() / logits.size(1)))
    if function is read_logit_pairs:
        num_tokens = 2 * max(1, num_tokens // 2)
    columns, difference = [], None
    for start in range(0, logits.size(0), num_tokens):
        chunk = slice(start, start + num_tokens)
        *results, difference = function(logits[chunk].to(sum_dtype), target[chunk], sum_dtype, *options)
        columns.append(results)
        if difference is not None:
            logits[chunk] = difference
    return *(torch.cat(column) for column in zip(*columns, strict=True)), None if difference is None else logits
