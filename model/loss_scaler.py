"""Loss scaling for float16 training, which keeps small gradients from underflowing."""

import torch
from torch import Tensor

_INITIAL_FACTOR = 2.0**16
_GROWTH_INTERVAL = 2000


class LossScaler:
    """A factor on the loss that is halved after a non-finite gradient and doubled after 2,000 finite ones.

    The rule is that of `torch.amp.GradScaler`. Unlike GradScaler, this class never synchronizes the host with a GPU,
    and it leaves the gradients scaled: the optimizer divides by the factor, after clipping.
    """

    def __init__(self) -> None:
        self.factor = torch.tensor(_INITIAL_FACTOR)
        self._finite = torch.zeros(())
        """Number of steps since the factor changed."""

    def update(self, skipped: Tensor) -> None:
        """Update the factor after a step; `skipped` is 1 if its gradient was not finite, else 0."""
        finite = (self._finite + 1.0) * (1.0 - skipped)
        grows = (finite >= _GROWTH_INTERVAL).float()
        self.factor = self.factor * (1.0 - 0.5 * skipped) * (1.0 + grows)
        self._finite = finite * (1.0 - grows)

    def state(self) -> list[float]:
        """Return the state as plain values, for a checkpoint."""
        return [self.factor.item(), self._finite.item()]

    def load_state(self, state: list[float]) -> None:
        """Restore what `state` returned."""
        self.factor, self._finite = torch.tensor(state)
