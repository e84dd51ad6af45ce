"""Private names of other libraries that the project uses are still where they were.

A failure here means that the library has moved something: see the module named in the test for what it is used for.
"""

import inspect

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import WeightAveraging

from pipeline.compat.lightning import disable_signal_handling


def test_lightning() -> None:
    """See pipeline/compat/lightning.py."""
    trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", barebones=True)
    assert callable(trainer._signal_connector.register_signal_handlers)
    loop = trainer.fit_loop.epoch_loop
    assert "self._broadcast_sigterm_tensor()" in inspect.getsource(type(loop).advance)
    assert "register_signal_handlers()" in inspect.getsource(Trainer._run)
    disable_signal_handling(trainer)
    assert trainer._signal_connector.register_signal_handlers() is None
    assert loop._broadcast_sigterm_tensor() is None
    assert {"restarting", "run"} <= set(dir(loop.val_loop))
    averaging = WeightAveraging()
    assert averaging._average_model is None
    assert averaging._latest_update_step == 0
    assert "self._swap_models(pl_module)" in inspect.getsource(WeightAveraging.on_validation_epoch_start)
