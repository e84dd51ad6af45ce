"""R-Drop's divergence between two passes with different dropout (Liang et al. 2021).

Equation 4 of https://arxiv.org/abs/2106.14448 has the loss, for the passes P and Q over the same tokens:

    loss(P) + loss(Q) + alpha * (KL(P || Q) + KL(Q || P)) / 2

`model/loss.py` computes half of that, so that loss and gradient have the size of a single pass.
"""

import torch
from torch import Tensor


def divergence(logits: Tensor, probabilities: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Compute alpha * (KL(P || Q) + KL(Q || P)) / 2 of each token, and add its gradient to the probabilities.

    Args:
        logits: [2 tokens, V]; those of P are at even places, and those of Q after them, at odd ones.
        probabilities: softmax(logits) [2 tokens, V], in the dtype of the results.
        alpha: the weight.

    Returns:
        Half of the divergence, twice for each token [2 tokens, 1], and the probabilities plus the gradient of the
        divergence by the logits [2 tokens, V].
    """
    # log(P / Q) is the difference of the logits plus a constant for each token. The constant is left out, because it
    # cancels: KL(Q || P) has it with the other sign, and the gradient has log(P / Q) - KL(P || Q).
    half = 0.5 * alpha
    difference = (logits[::2].to(probabilities.dtype) - logits[1::2]).mul_(half)
    gradient, weighted = torch.empty_like(probabilities), []
    for first in (0, 1):
        if first:
            difference.neg_()
        own, other, part = probabilities[first::2], probabilities[1 - first :: 2], gradient[first::2]
        torch.mul(own, difference, out=part)
        weighted.append(part.sum(-1, keepdim=True))  # alpha / 2 * KL(own || other) without the constant
        # d KL(own || other) is own * (log(own / other) - KL) by own's logits, and other - own by other's.
        part.addcmul_(own, 1.0 + half - weighted[-1]).sub_(other, alpha=half)
    return (0.5 * (weighted[0] + weighted[1])).repeat_interleave(2, 0), gradient
