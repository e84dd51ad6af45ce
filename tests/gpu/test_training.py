"""Properties of training on a GPU. Each test also runs on the CPU, as far as it applies."""

import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from data_module.batching.batch import SpecialIds
from data_module.corpus.store import ParallelCorpus, TokenStore, TokenStoreWriter
from data_module.settings import BatchSettings
from data_module.translation_data_module import TranslationDataModule
from model.loss import label_smoothed_loss
from model.settings import DecodingSettings, NetworkSettings, TrainingSettings
from model.translation_module import TranslationModule
from pipeline.checkpointing.ema import EMA
from pipeline.monitoring.training_monitor import TrainingMonitor
from pipeline.profiling.stopwatch import PeakMemory
from pipeline.training.precision import precision_plugin
from tests.model.test_compilation import DEVICES, PAD, VOCABULARY, share_of

SPECIAL = SpecialIds(pad=PAD, bos=1, eos=2)
SHAPES = [(5, 9, 7), (3, 20, 24), (1, 6, 6)]


@pytest.fixture(autouse=True)
def _kernels_as_before() -> Iterator[None]:
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    yield
    torch.backends.cuda.enable_cudnn_sdp(enabled)


@pytest.fixture
def corpus_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a corpus of random pieces. It needs no tokenizer, so sentencepiece need not be installed."""
    draws = np.random.default_rng(1)
    lengths = draws.integers(2, 15, (2, 300), dtype=np.uint16)
    for side, of_side in zip(("source", "target"), lengths, strict=True):
        with TokenStoreWriter(tmp_path / f"train.{side}", np.dtype(np.uint16)) as store:
            store.append_flat(draws.integers(3, VOCABULARY, of_side.sum()), of_side)
    stores = [TokenStore(tmp_path / f"train.{side}") for side in ("source", "target")]
    corpus = ParallelCorpus(*stores, identity=str(tmp_path), longest=int(lengths.max()))
    monkeypatch.setattr("data_module.translation_data_module.open_corpus", lambda *_: corpus)
    return tmp_path


def module(device: str, compiled: bool = False, scale_loss: bool = False) -> Any:
    """Return a module as `fit` prepares it, with heads of a size that every kernel supports."""
    torch.manual_seed(3)
    settings = NetworkSettings(num_layers=1, d_model=128, d_ff=64, num_heads=2, dropout=0.0)
    training = TrainingSettings(gradient_clip_norm=1.0)
    made = TranslationModule(VOCABULARY, SPECIAL, settings, training, DecodingSettings(), 1, compiled, scale_loss)
    made.on_fit_start()
    return made.to(device).train()


class _NoWaiting(Callback):
    """After all kinds of batches have occurred, makes synchronization with the GPU an error."""

    steps = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run each kind of length that needs a graph of its own, since the corpus may contain some of them late."""
        for masked in (False, True):
            share = share_of([(3, source, target) for source in (8, 9) for target in (8, 9)], masked)
            for batch in share.to(pl_module.device).micro_batches:
                with trainer.precision_plugin.train_step_context():
                    pl_module.losses(batch).smoothed.backward()
        pl_module.zero_grad()

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 10 and trainer.strategy.root_device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.steps += 1
        if trainer.global_step == trainer.max_steps and trainer.strategy.root_device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("compiled", "precision"),
    [(False, "bf16-mixed"), (False, "16-mixed"), pytest.param(True, "bf16-mixed", marks=pytest.mark.slow)],
)
@pytest.mark.filterwarnings("ignore:You have overridden `transfer_batch_to_device`")
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*LeafSpec")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_step_waits_for_the_device(device: str, compiled: bool, precision: str, corpus_folder: Path) -> None:
    """Covers loader, copy, micro-batches with and without mask, loss, clipping, Adam, EMA, Lightning and monitor."""
    data = TranslationDataModule(corpus_folder, BatchSettings(batch_tokens=400, group_tokens=100), SPECIAL, seed=1)
    watch = _NoWaiting()
    float16 = precision_plugin({"precision": precision, "accelerator": device})
    trainer = Trainer(
        accelerator=device,
        devices=1,
        precision=None if float16 else precision,
        plugins=float16,
        max_steps=16,
        max_epochs=-1,
        limit_val_batches=0,
        logger=False,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[TrainingMonitor(every_steps=100), EMA(decay=0.9), watch],
    )
    try:
        made = module("cpu", compiled, scale_loss=float16 is not None)
        trainer.fit(made, datamodule=data)
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert watch.steps == 16


@pytest.mark.parametrize("device", DEVICES)
def test_training_batches_are_in_memory_that_a_gpu_copies_by_itself(device: str, corpus_folder: Path) -> None:
    data = TranslationDataModule(corpus_folder, BatchSettings(batch_tokens=400, workers=1), SPECIAL, seed=1)
    for share in islice(data.train_dataloader(), 3):
        assert share.ids.is_pinned() == torch.cuda.is_available()
        assert share.to(device, non_blocking=True).ids.device.type == device


@pytest.mark.parametrize("device", DEVICES)
def test_batches_without_a_mask_take_the_flash_kernel(device: str) -> None:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    made = module(device)
    head = torch.zeros(3, 2, 7, 64, dtype=dtype, device=device, requires_grad=True)
    for causal in (False, True):
        assert torch._fused_sdp_choice(head, head, head, is_causal=causal) == SDPBackend.FLASH_ATTENTION.value
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), torch.autocast(device, dtype, enabled=device == "cuda"):
        for batch in share_of(SHAPES, masked=False).to(device).micro_batches:
            made.losses(batch).smoothed.backward()
        if device == "cuda":  # shows that no other kernel was enabled
            masked = share_of(SHAPES, masked=True).to(device).micro_batches[0]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch warns why each kernel was not used
                with pytest.raises(RuntimeError, match="No available kernel"):
                    made.losses(masked)


def loss_and_gradient(
    made: TranslationModule, device: str, masked: bool, low: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    made.zero_grad()
    total = torch.zeros((), device=device)
    for batch in share_of(SHAPES, masked).to(device).micro_batches:
        with torch.autocast(device, low, enabled=low is not None):
            sums = made.losses(batch)
        sums.smoothed.backward()
        total += sums.smoothed.detach()
    gradients = [parameter.grad.flatten() for parameter in made.parameters() if parameter.grad is not None]
    return total.cpu(), torch.cat(gradients).cpu()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_stay_near_float32(device: str, masked: bool, dtype: torch.dtype) -> None:
    exact, exact_gradient = loss_and_gradient(module("cpu"), "cpu", masked)
    low, low_gradient = loss_and_gradient(module(device), device, masked, dtype)
    torch.testing.assert_close(low, exact, rtol=0.005, atol=0)
    assert (low_gradient - exact_gradient).norm() < 0.03 * exact_gradient.norm()


@pytest.mark.parametrize("device", DEVICES)
def test_float32_is_the_cpus_with_masks_and_without(device: str) -> None:
    for masked in (False, True):
        exact, exact_gradient = loss_and_gradient(module("cpu").double(), "cpu", masked)
        found, gradient = loss_and_gradient(module(device), device, masked)
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=0, check_dtype=False)
        assert (gradient - exact_gradient).norm() < 1e-4 * exact_gradient.norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_loss_takes_less_than_a_gigabyte(device: str, compiled: bool) -> None:
    """At the paper's size on a GPU. A small size on the CPU checks the measurement."""
    tokens, d_model, pieces = (25_000, 512, 37_000) if device == "cuda" else (4_000, 16, 9_000)
    weight = torch.randn(pieces, d_model, device=device, requires_grad=True)
    targets = torch.randint(0, pieces, (tokens,), device=device, dtype=torch.int32)

    def step() -> Tensor:
        states = torch.randn(tokens, d_model, device=device, requires_grad=True)
        memory = PeakMemory(torch.device(device)) if measured else None
        with torch.autocast(device, torch.bfloat16):
            smoothed = label_smoothed_loss(states, weight, targets, 0.1, PAD, compiled).smoothed
        smoothed.backward()
        peaks.append(memory.read() if memory is not None else 0)
        weight.grad = None
        return smoothed.detach()

    peaks: list[int] = []
    measured = False
    step()  # compiling needs additional memory
    measured = True
    assert step().isfinite()
    # Half of all logits in float32 would exceed this on either device.
    assert 2 * pieces * d_model < peaks[-1] < (1_000_000_000 if device == "cuda" else tokens * pieces * 2)
