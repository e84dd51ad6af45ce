"""Private names of other libraries that the project uses still exist.

If a test fails, the library has changed. The module named in the test explains what the name is used for.
"""

import inspect
import os
from pathlib import Path

import pytest
import sacrebleu
import torch
import torchmetrics.utilities.plot
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from torch._higher_order_ops.while_loop import while_loop_op
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.runtime.cache_dir_utils import cache_dir

from pipeline.runtime import torch_private
from pipeline.runtime.lightning_private import disable_signal_handling
from tests.conftest import program


def test_torchmetrics() -> None:
    """Used in pipeline/metrics/private.py."""
    assert "\nif _MATPLOTLIB_AVAILABLE:\n    import matplotlib\n" in inspect.getsource(torchmetrics.utilities.plot)


def test_lightning() -> None:
    """Used in pipeline/runtime/lightning_private.py."""
    trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", barebones=True)
    assert callable(trainer._signal_connector.register_signal_handlers)
    loop = trainer.fit_loop.epoch_loop
    assert "self._broadcast_sigterm_tensor()" in inspect.getsource(type(loop).advance)
    assert "register_signal_handlers()" in inspect.getsource(Trainer._run)
    disable_signal_handling(trainer)
    assert trainer._signal_connector.register_signal_handlers() is None
    assert loop._broadcast_sigterm_tensor() is None
    assert {"restarting", "run"} <= set(dir(loop.val_loop))
    assert "self._forward_redirection(self.model, self.lightning_module, " in inspect.getsource(Strategy.training_step)
    created = "DistributedDataParallel(module=model, device_ids=device_ids, **self._ddp_kwargs)"
    assert created in inspect.getsource(DDPStrategy._setup_model)
    launch = inspect.getsource(_SubprocessScriptLauncher.launch)
    assert "_launch_process_observer(self.procs)" in launch
    assert launch.count("self.") == 7  # PatientLauncher.launch does the same with another observer
    assert "strategy._configure_launcher()" in inspect.getsource(type(trainer._accelerator_connector))
    assert WeightAveraging()._average_model is None
    assert "device = self._device or pl_module.device" in inspect.getsource(WeightAveraging.setup)


PROCESS_GROUP = """
import threading
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from data_module.errors import InputError
from pipeline.runtime import torch_private

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch_private.default_store().set("key", "value")
assert torch_private.default_store().get("key") == b"value"
model = DistributedDataParallel(torch.nn.Linear(2, 2))

events, called = [], threading.Event()

def reduce_later(state, bucket):  # gradients arrive after the callback, or, if it waits for them, after a minute
    future = torch.futures.Future()

    def arrive():
        called.wait(60)
        events.append("gradients")
        future.set_result(bucket.buffer())

    threading.Thread(target=arrive).start()
    return future

model.register_comm_hook(None, reduce_later)
loss = model(torch.ones(1, 2)).sum()
torch_private.call_after_backward(loss, lambda: (events.append("callback"), called.set()))
loss.backward()
assert events == ["callback", "gradients"], events
dist.destroy_process_group()
"""


def test_pytorch_process_group() -> None:
    """The store is that of the group, and a callback after the backward pass comes before DDP waits for gradients.

    In a process of its own: in one that had run a thousand other tests, this once hung inside PyTorch.
    """
    done = program(PROCESS_GROUP)
    assert done.returncode == 0, done.stderr.decode()


def test_pytorch_call_after_backward() -> None:
    """Called once, when all gradients are there, in the backward pass of this loss only."""
    weights = [torch.ones(2, requires_grad=True) for _ in range(3)]
    found: list[list[list[float]]] = []
    loss = (weights[0] * weights[1] * weights[2]).sum() * 2.0
    torch_private.call_after_backward(loss, lambda: found.append([weight.grad.tolist() for weight in weights]))
    weights[0].sum().backward()
    assert not found
    loss.backward()
    assert found == [[[3.0, 3.0], [2.0, 2.0], [2.0, 2.0]]]
    weights[0].sum().backward()
    assert len(found) == 1


def test_pytorch_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch sets the variable by this function when its compiler is imported. The search of model.pt2 has loops."""
    assert callable(AsyncCompile.warm_pool)
    assert torch_private.has_while_loop()
    assert callable(while_loop_op)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # so that what is set is removed afterwards
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    assert cache_dir() == os.environ["TORCHINDUCTOR_CACHE_DIR"] == torch_private.default_compiler_cache()


def test_pytorch_archive(tmp_path: Path) -> None:
    torch.save({"key": 1.0}, tmp_path / "saved")
    assert torch_private.archived_pickle(tmp_path / "saved").startswith(b"\x80\2}q\0X\3\0\0\0key")


def test_sacrebleu() -> None:
    """See pipeline/metrics/private.py; test_metrics.py compares what they give."""
    for name in ("_extract_corpus_statistics", "_compute_score_from_stats"):
        for kind in (sacrebleu.BLEU, sacrebleu.CHRF):
            assert hasattr(kind, name), (
                f"sacreBLEU {sacrebleu.__version__} has no {kind.__name__}.{name}; see private.py"
            )
