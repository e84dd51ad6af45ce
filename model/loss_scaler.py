"""A factor on the loss that keeps small gradients above float16's smallest number."""

import torch
from torch import Tensor

_FIRST = 2.0**16
_GROWS_AFTER = 2000


class LossScaler:
    """Halved by a gradient that is not finite, doubled after 2,000 that are.

    As in PyTorch's GradScaler, but the host never waits for a device, and gradients may be clipped in between: they
    are divided by the factor inside the fused optimizer.
    """

    def __init__(self) -> None:
        self.factor = torch.tensor(_FIRST)
        self._finite = torch.zeros(())
        """Steps since the factor was last changed."""

    def update(self, skipped: Tensor) -> None:
        """Adapt to a step, which was skipped (1) or not (0)."""
        finite = (self._finite + 1.0) * (1.0 - skipped)
        grows = (finite >= _GROWS_AFTER).float()
        self.factor = self.factor * (1.0 - 0.5 * skipped) * (1.0 + grows)
        self._finite = finite * (1.0 - grows)

    def state(self) -> list[float]:
        """Plain values for a checkpoint."""
        return [self.factor.item(), self._finite.item()]

    def load_state(self, state: list[float]) -> None:
        """As `state` gave it."""
        self.factor, self._finite = torch.tensor(state)
