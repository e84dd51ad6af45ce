"""Private API of Lightning, last seen in 2.6.6; `tests/pipeline/test_private_api.py` fails if it changes.

Private are `Trainer._signal_connector.register_signal_handlers`, `_TrainingEpochLoop._broadcast_sigterm_tensor` and its
`val_loop` with `restarting` and `run`, `Strategy._forward_redirection`, `DDPStrategy._setup_model`, `_ddp_kwargs` and
`_configure_launcher`, `_SubprocessScriptLauncher._call_children_scripts`, `_set_num_threads_if_needed`, a `scaler` of
`MixedPrecision` that is None, and `WeightAveraging._average_model` and `_device`. Docstrings say what for, and name the
public API if there is any.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

# Lightning sets it when it is imported. `torch.cuda.is_available` then only counts GPUs, also where the driver is too
# old for them, and PyTorch raises its error later, even in training on the CPU.
os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)


def disable_signal_handling(trainer: Trainer) -> None:
    """Stop Lightning from handling SIGTERM and SIGUSR1.

    Its handler communicates with other ranks from inside the signal, which deadlocks when they are elsewhere. In every
    step it also asks all ranks about the signal, which synchronizes the device.
    """
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


def precision_plugin(options: Mapping[str, object]) -> MixedPrecision | None:
    """Return Lightning's plugin for float16 without its gradient scaler, None for any other precision.

    The module scales the loss itself: Lightning's scaler does not allow clipping in manual optimization. Lightning
    accepts either a precision or a plugin, so with the plugin, leave the precision out of the Trainer's options.
    """
    if options.get("precision") != "16-mixed":
        return None
    plugin = MixedPrecision("16-mixed", "cpu" if options.get("accelerator") == "cpu" else "cuda")
    plugin.scaler = None
    return plugin


def run_validation(trainer: Trainer) -> None:
    """Run a whole validation now, during `fit`, before the next training step; the public `Trainer.validate` cannot."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    loop.restarting = False  # Start from the first batch: partial sums are not in the checkpoint.
    trainer.validating = True
    loop.run()
    trainer.training = True


def call_as_step(trainer: Trainer, method: str, *arguments: Any) -> Any:
    """Call a method of the LightningModule as Lightning calls `training_step`; public are only calls of the steps.

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


class RankObserver(threading.Thread):
    """Ends rank 0 and the other ranks some seconds after one of them has failed.

    Lightning's own observer does so at once, with SIGKILL: rank 0 could not report its error, and the run's exit code
    would be that of the signal. An error of all ranks, such as a full disk, rarely ends them at the same moment.
    `ranks` are the processes of ranks 1, 2 ... of this node.
    """

    def __init__(self, ranks: list[subprocess.Popen[bytes]], patience_seconds: float = 22) -> None:
        super().__init__(daemon=True, name="rank-observer")
        self._ranks = ranks
        self._patience_seconds = patience_seconds

    def run(self) -> None:
        """Wait until all ranks have ended, or one with an error."""
        while not any(codes := [process.poll() for process in self._ranks]):
            if None not in codes:
                return
            time.sleep(1)
        time.sleep(self._patience_seconds)
        ended = ", ".join(f"rank {rank} with exit code {code}" for rank, code in enumerate(codes, start=1) if code)
        print(f"error: ended before the others: {ended}; its output says why", file=sys.stderr, flush=True)
        for process in self._ranks:
            process.kill()
        os.kill(os.getpid(), signal.SIGKILL)  # SIGTERM does not end a process that waits in a collective


class PatientLauncher(_SubprocessScriptLauncher):
    """Starts the other ranks of this node after a call of `prepare`, and observes them with `RankObserver`."""

    procs: list[subprocess.Popen[bytes]]
    prepare: Callable[[], None]

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Start the ranks, then call the function."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self.prepare()
            self._call_children_scripts()
            RankObserver(self.procs).start()
        _set_num_threads_if_needed(num_processes=self.num_processes)  # The ranks of this node share its processors.
        return function(*args, **kwargs)


class SingleStreamDDP(DDPStrategy):
    """DDP whose wrapper is created on the current stream, and whose ranks are started by `PatientLauncher`.

    Lightning creates the wrapper on a stream of its own (later versions do not). Gradients are then accumulated on that
    stream, and for each parameter the backward pass records events and lets the streams wait for one another.
    """

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = PatientLauncher(self.cluster_environment, self.num_processes, self.num_nodes)
        self._launcher.prepare = self.prepare_launch

    def prepare_launch(self) -> None:
        """Prepare the start of the other ranks; called before this process starts them."""

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)


class WeightAveragingBase(WeightAveraging):
    """`WeightAveraging` on the device of the weights, whose averaged model a subclass can reach."""

    swapped = False
    """Whether the module currently holds the average and the averaged model the weights (during validation)."""

    @property
    def average(self) -> AveragedModel:
        """The averaged model; it exists after `setup`."""
        assert self._average_model is not None
        return self._average_model

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Create the averaged model on the device that the weights move to later; the module is still on the CPU."""
        self._device = trainer.strategy.root_device
        super().setup(trainer, pl_module, stage)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the average into the module."""
        super().on_validation_epoch_start(trainer, pl_module)
        self.swapped = self._average_model is not None

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the weights back into the module."""
        super().on_validation_epoch_end(trainer, pl_module)
        self.swapped = False
