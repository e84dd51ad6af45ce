"""Exponential moving average of the weights (`training.ema_decay`)."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from model.torch_private import copy_all
from pipeline.compat.lightning import WeightAveragingBase
from pipeline.compat.pytorch import lerp_all


class EMA(WeightAveragingBase):
    """Keep a moving average of the weights; validation and translation use the average.

    Lightning's own implementation keeps the average on the CPU, where the module still is during `setup`, and copies
    all weights there in every step. On a GPU the host would have to wait for that copy.
    """

    def __init__(self, decay: float) -> None:
        """After each step the average becomes `decay * average + (1 - decay) * weights`."""
        super().__init__()
        self._decay = decay

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Create the average on the device that the weights will be on."""
        self._device = trainer.strategy.root_device
        super().setup(trainer, pl_module, stage)

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Update the average; the first update copies the weights."""
        if trainer.global_step <= self.latest_update_step:
            return
        average: list[Tensor] = list(self.averaged_module.parameters())
        weights: list[Tensor] = list(pl_module.parameters())
        if self.latest_update_step == 0:
            copy_all(average, weights)
        else:
            lerp_all(average, weights, 1.0 - self._decay)
        self.average.n_averaged += 1
        self.latest_update_step = trainer.global_step

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the average as `state_dict` and the weights as `current_model_state`, also during a validation."""
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        if self.swapped:
            average = checkpoint["current_model_state"]
            checkpoint["current_model_state"] = checkpoint["state_dict"]
            checkpoint["state_dict"] = average

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Do not replace the weights by the average: the last checkpoint holds both, so that the run can resume."""
