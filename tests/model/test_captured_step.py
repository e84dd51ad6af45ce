"""A training step obeys the rules of CUDA graphs, as far as a CPU can show them.

What records here notes PyTorch's operations with the tensors that they read and write, and repeats them on the same
tensors. As in a CUDA graph, numbers and addresses are those of the recorded step, and nothing may be read by the host.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

import model.packed_attention
from data_module.batching.batch import RankBatch
from model.fast.captured_step import CapturedStep
from model.fast.cast_weights import CastWeights
from model.settings import TrainingSettings
from pipeline.runtime.devices import precision_plugin
from tests.conftest import ALONE
from tests.model.sentence_batches import Lengths, packed, row_shape
from tests.model.test_compilation import masked_attention
from tests.model.test_training_module import TRAINING, Recorder, Step, fit, make_module, pytestmark  # noqa: F401

HOST_READS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "unique_dim"}


class Recording(TorchDispatchMode):
    """Notes operations while they are computed, and repeats them by `replay`, from its second call on.

    A CUDA graph computes nothing while it is recorded, so a first call follows at once.
    """

    def __init__(self, function: Callable[[], object]) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        self._is_computed = True
        with self:
            function()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in HOST_READS, f"the host reads the result of {name}"
        result = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        if self._is_computed:
            self._is_computed = False
            return
        with torch.no_grad(), torch.autocast("cpu", enabled=False):  # what is noted has been cast
            for func, args, kwargs, result in self._calls:
                again = func(*args, **kwargs)
                for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


class Watch(Callback):
    """Makes the fifth step's gradients infinite, and notes where weights, gradients and moments are."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 4:
            self._weight = pl_module.network.embedding.weight.clone()
            pl_module.network.embedding.weight.data.fill_(math.inf)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 5:
            pl_module.network.embedding.weight.data.copy_(self._weight)
        parameters = list(pl_module.parameters())
        tensors = [*parameters, *(p.grad for p in parameters), *tree_leaves(list(trainer.optimizers[0].state.values()))]
        self.steps.append([tensor.data_ptr() for tensor in tensors if tensor is not None])


def make_shares() -> list[RankBatch]:
    """Return steps of one to three micro-batches of one shape, of different sentences and numbers of target tokens."""
    parts: list[Lengths] = [[(3 + number, 9), (9, 2 + number)] * (2 + number % 3) for number in range(12)]
    shape = row_shape(parts)
    steps = (parts[:1], parts[1:3], parts[3:6], parts[6:8], parts[8:9], parts[9:12])
    return [packed(step, shape=shape, num_target_tokens=200 + 7 * number) for number, step in enumerate(steps)]


def train(settings: TrainingSettings, precision: str, record: Any = None) -> tuple[list[Step], list[list[int]]]:
    """Train in steps that `record` records, or as they are if it is None."""
    module = make_module(settings, dropout=0.3, scale_loss=precision == "16-mixed")
    module.backend = replace(
        module.backend,
        cast_weights=CastWeights if precision != "32-true" else None,
        captured_step=None if record is None else partial(CapturedStep, record=record),
    )
    watch = Watch()
    options = {"plugins": precision_plugin({"precision": precision, "accelerator": "cpu"})}
    if precision != "16-mixed":
        options = {"precision": precision}
    return fit(module, make_shares(), callbacks=[watch], **options), watch.steps


@pytest.mark.parametrize(
    ("precision", "options"),
    [
        ("32-true", {"gradient_clip_norm": 0.2, "weight_decay": 0.1}),
        ("bf16-mixed", {"r_drop_alpha": 2.0, "optimizer": "muon"}),
        ("16-mixed", {"gradient_clip_norm": 0.2}),
    ],
)
def test_a_recorded_step_repeated_is_every_step(
    precision: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: other sentences, dropout, rates and numbers of micro-batches, and a step that is skipped."""
    monkeypatch.setattr(model.packed_attention, "_flash", masked_attention)
    settings, recordings = replace(TRAINING, **options), []

    def record(function: Callable[[], object]) -> Callable[[], None]:
        recordings.append(Recording(function))
        return recordings[-1].replay

    (expected, _), (found, addresses) = train(settings, precision), train(settings, precision, record)
    assert [float(step.output["skipped"]) for step in expected] == [0, 0, 0, 0, 1, 1]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.weights, theirs.weights)
        torch.testing.assert_close(ours.output, theirs.output, rtol=0, atol=0, equal_nan=True)
    assert len(recordings) == 3  # of a step's first micro-batch, of the others, and of the optimizer's step
    assert addresses[3] == addresses[4] == addresses[5]


@pytest.mark.gpu
def test_graphs_on_a_gpu_compute_the_same_steps() -> None:
    """To rounding, since gradients of the embedding are added up by atomic operations."""
    results = []
    for captured_step in (None, CapturedStep):
        module = make_module(dropout=0.3)
        module.backend = replace(module.backend, cast_weights=CastWeights, captured_step=captured_step)
        recorder = Recorder()
        trainer = Trainer(
            accelerator="cuda",
            devices=1,
            precision="bf16-mixed",
            max_steps=6,
            callbacks=[recorder],
            **ALONE,
        )
        trainer.fit(module, DataLoader(make_shares(), batch_size=None, pin_memory=True))
        results.append([step.weights for step in recorder.steps])
    torch.testing.assert_close(*results, rtol=0.01, atol=1e-3)


def test_an_optimizer_that_waits_for_the_device_is_refused() -> None:
    optimizer = SGD([torch.nn.Parameter(torch.zeros(2))])
    with pytest.raises(ValueError, match=r"^SGD .*; set run\.cuda_graphs to false, and"):
        CapturedStep(print, print, optimizer)  # type: ignore[arg-type]
