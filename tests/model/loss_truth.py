"""States, weights and targets for the tests of the loss, and R-Drop's loss by PyTorch's functions."""

import torch
import torch.nn.functional as F

PAD = 0


def problem(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    states = torch.randn(3, 11, 8, dtype=dtype, generator=generator).requires_grad_()
    weight = torch.randn(50, 8, dtype=dtype, generator=generator).requires_grad_()
    targets = torch.randint(1, 50, (3, 11), generator=generator)
    targets[0, 6:] = PAD
    targets[2] = PAD
    with torch.no_grad():
        # Padding that is predicted, a target that is predicted, and one that is exactly as probable as another class.
        weight[8:10] = torch.tensor([2, -2, 2, 2, -2, 2, 2, -2])
        states[2, 0], states[1, 0], states[1, 1] = 9 * weight[PAD], 9 * weight[7], weight[8]
        targets[1, 0], targets[1, 1] = 7, 9
    return states, weight, targets


def plain_r_drop(
    states: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, epsilon: float, alpha: float
) -> torch.Tensor:
    """Return the loss of equation 4 of R-Drop's paper, halved, by PyTorch's functions on all logits."""
    first, second = (F.linear(one, weight).flatten(0, 1) for one in states)
    options = {"ignore_index": PAD, "reduction": "sum", "label_smoothing": epsilon}
    entropy = sum(F.cross_entropy(one, targets.flatten(), **options) for one in (first, second))
    kept = targets.flatten() != PAD
    p, q = (one[kept].log_softmax(-1) for one in (first, second))
    divergence = sum(F.kl_div(*pair, reduction="sum", log_target=True) for pair in ((p, q), (q, p))) / 2
    return (entropy + alpha * divergence) / 2


def two_passes(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return states of two passes that differ, except in one row, and are scaled so that both are unsure."""
    states, weight, targets = problem(dtype)
    generator = torch.Generator().manual_seed(4)
    noise = torch.randn(states.shape, dtype=dtype, generator=generator)
    noise[0, 0] = 0
    states = torch.stack([states.detach(), states.detach() + noise]) * 0.3
    return states.requires_grad_(), weight, targets
