"""Exponential moving average of the weights."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor


class EMA(WeightAveraging):
    """A moving average of the weights, kept as Lightning keeps one: it is what is validated and what translates.

    Lightning's own stays on the CPU, where a module still is when callbacks are set up, and copies all weights there in
    every step; on a GPU it would make the host wait.
    """

    _exchanged = False
    """Whether the module has the average and the average the module's weights: while it is validated."""

    @property
    def state_key(self) -> str:
        """Key of the state in checkpoints: the class name in version 0.1.0."""
        return "MovingAverage"

    def __init__(self, decay: float) -> None:
        """After each step the average is `decay` of itself and the rest of the weights."""
        super().__init__()
        self._decay = decay

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """The average is where the weights are going to be."""
        self._device = trainer.strategy.root_device
        super().setup(trainer, pl_module, stage)

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """It begins as the weights after the first step."""
        assert self._average_model is not None
        if trainer.global_step <= self._latest_update_step:
            return
        average: list[Tensor] = list(self._average_model.module.parameters())
        weights: list[Tensor] = list(pl_module.parameters())
        if self._latest_update_step == 0:
            torch._foreach_copy_(average, weights)
        else:
            torch._foreach_lerp_(average, weights, 1.0 - self._decay)
        self._average_model.n_averaged += 1
        self._latest_update_step = trainer.global_step

    def _swap_models(self, pl_module: LightningModule) -> None:
        super()._swap_models(pl_module)
        self._exchanged = not self._exchanged

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Both under their own names, also where a run is stopped while it is validated."""
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        if self._exchanged:
            average = checkpoint["current_model_state"]
            checkpoint["current_model_state"] = checkpoint["state_dict"]
            checkpoint["state_dict"] = average

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the weights alone: the last checkpoint has both, so that a run can go on from it."""
