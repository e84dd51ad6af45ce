"""Label-smoothed cross-entropy, fused with the output projection (sections 3.4 and 5.4): formula, chunk, gradient.

The smoothed target assigns epsilon / V to each of the V classes and adds 1 - epsilon to the right one. This is the
definition of PyTorch and OpenNMT. fairseq distributes epsilon over the V - 1 wrong classes and tensor2tensor subtracts
a constant, so their losses differ slightly from these.

A batch of 25,000 tokens with a vocabulary of 37,000 pieces has 0.9 billion logits. They are never in memory at once:
the forward pass projects a chunk of tokens at a time and computes its gradients immediately; the backward pass only
scales them.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from model.beyond.r_drop import divergence


def plain_loss(states: Tensor, weight: Tensor, targets: Tensor, label_smoothing: float, ignored_id: int) -> Tensor:
    """Return the loss by its formula, from all logits at once; the arguments are those of `label_smoothed_loss`."""
    log_probabilities = (states @ weight.T).log_softmax(-1)
    target_loss = -log_probabilities.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    mean_loss = -log_probabilities.mean(-1)
    losses = (1.0 - label_smoothing) * target_loss + label_smoothing * mean_loss
    return losses[targets != ignored_id].sum()


ChunkTerms = Callable[[Tensor, Tensor, float], Tensor]
"""Does what `_read_logits` does for one pass with gradients: takes logits, target and epsilon; returns three terms."""


class LossSums(NamedTuple):
    """Sums over the target tokens of a micro-batch: scalars in float32, or in float64 for float64 states."""

    smoothed: Tensor
    """The training loss: label-smoothed cross-entropy, and R-Drop's divergence if there is one, times `scale`.

    The other fields carry no gradients. For two passes they are the means of both."""
    negative_log_likelihood: Tensor
    """Cross-entropy without smoothing. The exponential of its mean is the perplexity."""
    num_correct: Tensor
    """How often the right class is the most probable one. Ties count as correct; they occur in bfloat16."""


class _Options(NamedTuple):
    """`epsilon` is `label_smoothing`, `alpha` is `r_drop_alpha`; see `label_smoothed_loss`."""

    epsilon: float
    ignored_id: int
    product_dtype: torch.dtype
    sum_dtype: torch.dtype
    scale: Tensor | float | None
    alpha: float
    with_gradient: bool
    chunk_terms: ChunkTerms | None


def label_smoothed_loss(
    states: Tensor,
    weight: Tensor,
    targets: Tensor,
    label_smoothing: float,
    ignored_id: int,
    scale: Tensor | float | None = None,
    r_drop_alpha: float = 0.0,
    chunk_terms: ChunkTerms | None = None,
) -> LossSums:
    """Compute sums of the loss over all positions whose target is not `ignored_id`: `smoothed` is that of `plain_loss`.

    Products run in autocast's dtype if it is enabled; softmax, logarithms and sums in float32 or float64.

    Args:
        states: decoder states [..., D]; for R-Drop those of two passes [2, ..., D].
        weight: output projection [V, D].
        targets: integers [...], the pieces to predict.
        label_smoothing: epsilon in [0, 1).
        ignored_id: id of the padding symbol.
        scale: factor on `smoothed`. If it is given, the gradients already have it, and `backward` ignores the gradient
            that it receives: it must be called on `smoothed` itself.
        r_drop_alpha: weight of the divergence between two passes; 0 for one pass.
        chunk_terms: used for one pass with gradients; None for PyTorch's operators.
    """
    device = states.device.type
    product_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype
    # Decided here, because gradients are always disabled inside `_FusedLoss.forward`. A parameter requires gradients
    # even under inference_mode.
    with_gradient = torch.is_grad_enabled() and (states.requires_grad or weight.requires_grad)
    if r_drop_alpha:
        # The tokens of both passes alternate, so that a chunk has both passes of each of its tokens.
        states, targets = states.movedim(0, -2), targets.reshape(-1, 1).expand(-1, 2)
    states, targets = states.reshape(-1, states.size(-1)), targets.reshape(-1, 1).long().contiguous()
    options = _Options(
        epsilon=label_smoothing,
        ignored_id=ignored_id,
        product_dtype=product_dtype,
        sum_dtype=torch.promote_types(states.dtype, torch.float32),
        scale=scale,
        alpha=r_drop_alpha,
        with_gradient=with_gradient,
        chunk_terms=chunk_terms if with_gradient and not r_drop_alpha else None,
    )
    return LossSums(*_FusedLoss.apply(states, weight, targets, options))


_CHUNK_LOGITS, _CHUNK_TOKENS = 1 << 24, 512
"""Most logits of a chunk on a CPU, and about as many tokens where a product is added to the gradient without a copy.

With fewer, reading and writing the gradient of the weight takes long; with more, logits leave the cache."""
_CHUNK_SHARE, _CHUNK_MULTIPLE = 1 / 64, 128
"""Share of a GPU's memory that a chunk may take, with all that is computed from it. Its tokens are such a multiple.

With fewer chunks, the gradient of the weight is read and written fewer times. The share is of all memory, not of free
memory, so that a resumed run adds in the same order."""
_CACHED_LOGITS = 1 << 18
"""Logits that each thread of a CPU processes at a time after the product, so that they stay in its cache."""


def _read_logits(logits: Tensor, target: Tensor, terms: Tensor, options: _Options) -> None:
    """Compute all terms of the loss that depend on single logits, for a chunk of tokens.

    Args:
        logits: products of states and weights [N, V]. They are overwritten by d loss / d logits without its term
            -epsilon / V, if `options` ask for gradients.
        target: int64 [N, 1].
        terms: [4, N, 1], written: the largest logit, the target's logit, the probability of the most probable class,
            and R-Drop's divergence, which stays 0 for one pass.
        options: options of the loss.
    """
    size, on_cpu = len(logits), logits.device.type == "cpu"
    if on_cpu:  # an even number, for R-Drop's pairs
        size = 2 * max(1, round(_CACHED_LOGITS * torch.get_num_threads() / logits.size(1) / 2))
    for part, labels, part_terms in zip(logits.split(size), target.split(size), terms.split(size, 1), strict=True):
        # On a CPU, softmax of 16-bit logits takes several times as long.
        block = part.to(options.sum_dtype) if on_cpu else part
        probabilities = torch.softmax(block, -1, dtype=options.sum_dtype)
        part_terms[0], part_terms[1] = block.amax(-1, keepdim=True), block.gather(1, labels)
        part_terms[2] = probabilities.amax(-1, keepdim=True)
        if options.alpha:
            part_terms[3], probabilities = divergence(block, probabilities, options.alpha)
        if options.with_gradient:
            # d loss / d logits = p - (1 - epsilon) onehot - epsilon / V. `_forward` adds the last term.
            probabilities.scatter_add_(1, labels, probabilities.new_full(labels.shape, options.epsilon - 1.0))
            part.copy_(probabilities)


def _chunk_tokens(num_tokens: int, vocabulary_size: int, device: torch.device, options: _Options) -> int:
    """Return the number of tokens of a chunk, those of each pass counted, so that chunks are about equally large."""
    passes, size = 2 if options.alpha else 1, options.product_dtype.itemsize
    if device.type != "cuda":
        most = max(1, _CHUNK_LOGITS // vocabulary_size // passes)
        return passes * (most if size == 2 else min(most, max(_CHUNK_TOKENS // passes, most // 4)))
    # Memory holds the logits. PyTorch's operators add the probabilities and, before them, a copy of bfloat16 in their
    # dtype; a divergence adds two more tensors of the probabilities' size.
    copies = 3 if options.alpha else 1 + (options.product_dtype == torch.bfloat16)
    bytes_per_logit = size + (0 if options.chunk_terms else max(4, size) * copies)
    memory = _CHUNK_SHARE * torch.cuda.get_device_properties(device).total_memory
    num_chunks = math.ceil(num_tokens / max(memory / (bytes_per_logit * vocabulary_size), _CHUNK_MULTIPLE))
    return math.ceil(num_tokens / num_chunks / _CHUNK_MULTIPLE) * _CHUNK_MULTIPLE


def _over_chunks(
    states: Tensor, weighted_states: Tensor, weight: Tensor, target: Tensor, options: _Options
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Project a chunk of tokens at a time, read its logits, and add its part to the gradients.

    `weighted_states` are the states [N, D] times `token_weights`, see `_forward`; the weight is [V, D].

    Returns:
        The terms of all tokens; see `_read_logits`. The gradients of the states, without these weights, and of
        the projection, both without the term -epsilon / V of d loss / d logits, if `options` ask for them.
    """
    # Rows of zeros, up to a multiple of 8, since a GPU multiplies 16-bit matrices of other sizes more slowly. Their
    # logits stay zeros, which add nothing to the gradients.
    missing = -len(weight) % 8
    projection = F.pad(weight, [0, 0, 0, missing]) if missing else weight
    terms = states.new_zeros(4, *target.shape, dtype=options.sum_dtype)
    size = _chunk_tokens(len(target), len(projection), states.device, options)
    memory = states.new_empty(min(size, len(states)), len(projection))  # for the logits of one chunk after the other
    gradients = None
    if options.with_gradient:
        # The gradient of the weight adds up over chunks, in 32 bits: in bfloat16 a sum stops growing where a term is
        # below 1 / 256 of it.
        gradients = torch.empty_like(states), torch.zeros_like(projection, dtype=options.sum_dtype)
    for start in range(0, len(target), size):
        # Only what needs logits is in this loop, since every operation is a kernel launch per chunk. Gradients are
        # computed here, since the backward pass would have to project every chunk again.
        chunk = slice(start, start + size)
        logits = torch.mm(states[chunk], projection.t(), out=memory[: len(states[chunk])])
        if options.chunk_terms:
            terms[:3, chunk] = options.chunk_terms(logits[:, : len(weight)], target[chunk], options.epsilon)
        else:
            _read_logits(logits[:, : len(weight)], target[chunk], terms[:, chunk], options)
        if gradients is not None:
            grad_states, grad_weight = gradients
            gradient = logits  # overwritten by d loss / d logits
            torch.mm(gradient, projection, out=grad_states[chunk])
            _add_product(grad_weight, gradient.t(), weighted_states[chunk])
    return terms, gradients and (gradients[0], gradients[1][: len(weight)])


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add the product a @ b to a matrix in float32 or float64."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif total.device.type == "cuda":
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def _forward(
    ctx: Any, states: Tensor, weight: Tensor, target: Tensor, options: _Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums of `LossSums`. Save in `ctx` the gradients of states and weight, times `scale` if it is given."""
    epsilon, passes = options.epsilon, 2 if options.alpha else 1
    dtype, sum_dtype = options.product_dtype, options.sum_dtype
    kept = (target != options.ignored_id).to(sum_dtype)
    # Factors on the losses of tokens. The gradient of the weight gets them by way of the states, which is cheaper than
    # multiplying the sum over chunks. States of ignored tokens are 0 and add nothing.
    token_weights = kept * ((1.0 if options.scale is None else options.scale) / passes)
    kept_states = states.to(sum_dtype) * kept
    weighted_states = kept_states * token_weights
    # The smoothing term needs the mean of each token's logits. As sum_v h . w_v = h . sum_v w_v, this reads no logits.
    mean_weight = weight.to(sum_dtype).mean(0)
    mean_logits = (kept_states @ mean_weight).unsqueeze(1)
    terms, gradients = _over_chunks(kept_states.to(dtype), weighted_states.to(dtype), weight.to(dtype), target, options)
    largest, target_logits, max_probability, divergences = terms
    # For the logits z, max_v p_v = exp(max_v z_v) / Z, so the logarithm of the normalizer Z is the largest logit minus
    # the logarithm of the largest probability, which is finite: the largest probability is at least 1 / V.
    log_normalizer = largest - max_probability.log()
    # The loss of a token with target y is sum_v q_v (log Z - z_v), with q_v = epsilon / V and 1 - epsilon more for y.
    target_loss, mean_loss = log_normalizer - target_logits, log_normalizer - mean_logits
    smoothed = (((1.0 - epsilon) * target_loss + epsilon * mean_loss + divergences) * token_weights).sum()
    negative_log_likelihood = (target_loss * kept).sum() / passes
    num_correct = ((target_logits == largest) * kept).sum() / passes
    if gradients is not None:
        # The term -epsilon / V of d loss / d z is the same for all classes and tokens, so that its products with the
        # projection and with the states are multiples of sums over classes and over tokens. `grad_states` still lacks
        # the token weights; `grad_weight` has them from the weighted states.
        grad_states, grad_weight = gradients
        grad_states = (grad_states.to(sum_dtype) - epsilon * mean_weight) * token_weights
        grad_weight.sub_(weighted_states.sum(0), alpha=epsilon / len(weight))
        ctx.save_for_backward(grad_states.to(states.dtype), grad_weight.to(weight.dtype))
    ctx.mark_non_differentiable(negative_log_likelihood, num_correct)
    ctx.set_materialize_grads(False)
    return smoothed, negative_log_likelihood, num_correct


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        states, *_, options = inputs
        ctx.is_scaled = options.scale is not None
        with torch.autocast(states.device.type, enabled=False):
            return _forward(ctx, *inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grad_states, grad_weight = ctx.saved_tensors
        # With a scale, the saved gradients already have it, and gradients[0] is 1; see `label_smoothed_loss`.
        if not ctx.is_scaled:
            scale = gradients[0]
            grad_states, grad_weight = grad_states * scale.to(grad_states.dtype), grad_weight * scale
        return grad_states, grad_weight, None, None
