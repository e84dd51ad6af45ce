"""Private API of Lightning, last seen in 2.6.6; `tests/pipeline/test_private_api.py` fails when it moves.

- `Trainer._signal_connector.register_signal_handlers` and `_TrainingEpochLoop._broadcast_sigterm_tensor`: leave SIGTERM
  and SIGUSR1 to `runtime.signals`. No public alternative.
- `_TrainingEpochLoop.val_loop`, its `restarting` and `run`: run a validation outside the loop's schedule. The public
  `Trainer.validate` does not work inside `fit`.
- `Strategy._forward_redirection`: call a method of the module inside the forward pass of its DDP wrapper. Public: for
  `training_step` and other steps only.
- `DDPStrategy._setup_model` and `_ddp_kwargs`: create the DDP wrapper on the stream that training uses. No public
  alternative; later versions of Lightning do so themselves.
- `WeightAveraging._average_model`, `_latest_update_step` and `_swap_models`: keep the average on the weights' device.
  No public alternative.
"""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel


def disable_signal_handling(trainer: Trainer) -> None:
    """Stop Lightning from handling SIGTERM and SIGUSR1.

    Its handler communicates with other ranks from inside the signal, which deadlocks when they are elsewhere. In every
    step it also asks all ranks about the signal, which synchronizes the device.
    """
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


def run_validation(trainer: Trainer) -> None:
    """Run a whole validation now, during `fit`, before the next training step."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    loop.restarting = False  # Start from the first batch: partial sums are not in the checkpoint.
    trainer.validating = True
    loop.run()
    trainer.training = True


def call_as_step(trainer: Trainer, method: str, *arguments: Any) -> Any:
    """Call a method of the LightningModule as Lightning calls `training_step`.

    The autocast state is that of a step. Under DDP the method runs inside the wrapper's forward pass, where
    torch.compile splits graphs at gradient buckets.
    """
    strategy = trainer.strategy
    assert strategy.model is not None
    assert strategy.lightning_module is not None
    with strategy.precision_plugin.train_step_context():
        if strategy.model is strategy.lightning_module:
            return getattr(strategy.model, method)(*arguments)
        return strategy._forward_redirection(strategy.model, strategy.lightning_module, method, *arguments)


class SingleStreamDDP(DDPStrategy):
    """DDP whose wrapper is created on the current stream.

    Lightning creates it on a stream of its own. Gradients are then accumulated on that stream, and for each parameter
    the backward pass records events and lets the streams wait for one another.
    """

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)


class WeightAveragingBase(WeightAveraging):
    """`WeightAveraging` with the names that a subclass needs."""

    swapped = False
    """Whether the module currently holds the average and the averaged model the weights (during validation)."""

    @property
    def average(self) -> AveragedModel:
        """The averaged model; it exists after `setup`."""
        assert self._average_model is not None
        return self._average_model

    @property
    def averaged_module(self) -> nn.Module:
        """The module whose parameters are the average."""
        return self.average.module

    @property
    def latest_update_step(self) -> int:
        """The optimizer step after which the average was updated last; 0 before the first update."""
        return self._latest_update_step

    @latest_update_step.setter
    def latest_update_step(self, step: int) -> None:
        self._latest_update_step = step

    def _swap_models(self, pl_module: LightningModule) -> None:
        super()._swap_models(pl_module)
        self.swapped = not self.swapped
