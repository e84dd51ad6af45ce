"""Properties of training on a GPU. Each test also runs on the CPU, as far as it applies."""

from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from data_module.batch import PackedBatch, PaddedBatch, RankBatch
from data_module.corpus.store import ParallelCorpus, TokenStore, TokenStoreWriter
from data_module.settings import BatchSettings
from data_module.translation_data_module import TranslationDataModule
from model.backend import Backend
from model.fast.compilation import CompiledForward, compiled_chunk_terms
from model.loss import label_smoothed_loss, plain_loss
from model.packed_attention import FLASH_ATTENTION, PLAIN_ATTENTION
from model.settings import DecodingSettings, NetworkSettings, TrainingSettings
from model.training_module import TranslationModule
from pipeline.checkpointing.callback import EMA
from pipeline.monitoring.training_monitor import TrainingMonitor
from pipeline.runtime.backend_choice import choose_backend
from pipeline.runtime.lightning_private import SingleStreamDDP, precision_plugin
from pipeline.training.memory_probe import MemoryProbe
from tests.benchmark.train import PeakMemory
from tests.compilations import Compilations
from tests.conftest import ALONE
from tests.model.fast_paths import check_chunk_terms
from tests.model.sentence_batches import PAD, SPECIAL, VOCABULARY, packed, padded

WARNINGS = [".*does not have many workers", ".*LeafSpec"]
WARNINGS += ["Synchronization debug mode is a prototype", "Total length of .* across ranks is zero"]
WARNINGS += [
    "Warning. Profiler clears events",
    ".*should not be instantiated",
]  # the last is the compiler's about itself
pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in WARNINGS]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NETWORK = NetworkSettings(num_layers=1, d_model=128, d_ff=64, num_heads=2, dropout=0.0)
"""Its heads have a size that every kernel supports."""
LENGTHS = [[(9, 7)] * 5, [(20, 24), (3, 3), (19, 70)], [(6, 6)]]
"""Source and target length of the pairs of each micro-batch."""
LAYOUTS = [
    ("cpu", "padded"),
    ("cpu", "plain"),
    pytest.param("cuda", "padded", marks=pytest.mark.gpu),
    pytest.param("cuda", "plain", marks=pytest.mark.gpu),
]
FLASH = pytest.param("cuda", "flash", marks=pytest.mark.gpu)


def make_backend(device: str, compiled: bool = False, precision: str = "bf16-mixed") -> Backend:
    """Return the backend of a GPU without the checks of `choose_backend`; on a CPU, that of PyTorch's operators."""
    attention = FLASH_ATTENTION if device == "cuda" and precision.endswith("-mixed") else PLAIN_ATTENTION
    parts = {"compiled": CompiledForward, "chunk_terms": compiled_chunk_terms()} if compiled else {}
    return Backend(precision, attention=attention, **parts)


@pytest.fixture
def corpus_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a corpus of random pieces. It needs no tokenizer, so sentencepiece need not be installed."""
    draws = np.random.default_rng(1)
    lengths = draws.integers(2, 15, (2, 300), dtype=np.uint16)
    for side, of_side in zip(("source", "target"), lengths, strict=True):
        with TokenStoreWriter(tmp_path / f"train.{side}", np.dtype(np.uint16)) as store:
            store.append_flat(draws.integers(3, VOCABULARY, of_side.sum()), of_side)
    stores = [TokenStore(tmp_path / f"train.{side}") for side in ("source", "target")]
    corpus = ParallelCorpus(*stores, longest=int(lengths.max()))
    monkeypatch.setattr("data_module.translation_data_module.open_variants", lambda _: [corpus])
    monkeypatch.setattr("data_module.translation_data_module.open_corpus", lambda *_: corpus)
    return tmp_path


def module(device: str, backend: Backend | None = None, **options: object) -> TranslationModule:
    """Return a module as `fit` prepares it."""
    torch.manual_seed(3)
    training = TrainingSettings(gradient_clip_norm=1.0)
    settings = NETWORK, training, DecodingSettings()
    made = TranslationModule(VOCABULARY, SPECIAL, *settings, 1, backend or make_backend(device, **options))
    made.on_fit_start()
    return made.to(device).train()


def module_for(device: str, layout: str) -> TranslationModule:
    """Return a module with the attention that a layout of `LAYOUTS` names."""
    made = module(device)
    if layout == "plain":
        made.backend = replace(made.backend, attention=PLAIN_ATTENTION)
    return made


class _NoWaiting(Callback):
    """After a few batches, makes synchronization with the GPU an error."""

    steps = micro_batches = 0

    def on_train_batch_start(self, trainer: Trainer, *_: object) -> None:
        if trainer.global_step == 10 and trainer.strategy.root_device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: RankBatch, batch_idx: int
    ) -> None:
        self.steps += 1
        self.micro_batches += len(batch.shapes)
        if trainer.global_step == trainer.max_steps and trainer.strategy.root_device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("device", "compiled", "precision"),
    [
        ("cpu", False, "bf16-mixed"),
        pytest.param("cpu", False, "16-mixed", marks=pytest.mark.slow),
        pytest.param("cpu", False, "32-true", marks=pytest.mark.slow),
        pytest.param("cpu", True, "bf16-mixed", marks=pytest.mark.slow),
        *(pytest.param("cuda", False, name, marks=pytest.mark.gpu) for name in ("bf16-mixed", "16-mixed", "32-true")),
        pytest.param("cuda", True, "bf16-mixed", marks=[pytest.mark.gpu, pytest.mark.slow]),
    ],
)
def test_no_step_waits_for_the_device(device: str, compiled: bool, precision: str, corpus_folder: Path) -> None:
    """Covers loader, copy, micro-batches for all attentions, loss, clipping, Adam, EMA, Lightning and monitor."""
    batches = BatchSettings(batch_tokens=400, max_tokens_per_device=160)
    options = {"accelerator": "cpu" if device == "cpu" else "gpu", "precision": precision}
    backend = choose_backend("pytorch", compiled, options, NETWORK)
    plain = device == "cpu" or precision == "32-true"
    assert (backend.attention.name == "plain") == plain
    data = TranslationDataModule(corpus_folder, batches, SPECIAL, seed=1, constant_rows=backend.attention.constant_rows)
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
        callbacks=[TrainingMonitor(every_steps=100), EMA(decay=0.9), watch],
        **ALONE,
    )
    try:
        made = module("cpu", backend=backend)
        trainer.fit(made, datamodule=data)
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert watch.steps == 16
    assert watch.micro_batches >= 2 * 16


class _CountCompilations(Callback):
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.before = -1
        self._compilations = Compilations().__enter__()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.before = self._compilations.count

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._compilations.__exit__(None, None, None)
        self.in_steps = self._compilations.count - self.before


def train_alone(data: TranslationDataModule, made: TranslationModule, strategy: object, *callbacks: Callback) -> None:
    """Train on one GPU for eight steps; with DDP, in a group of one rank."""
    trainer = Trainer(
        accelerator="cuda",
        devices=1,
        strategy=strategy,
        precision="bf16-mixed",
        max_steps=8,
        max_epochs=-1,
        limit_val_batches=0,
        callbacks=list(callbacks),
        **ALONE,
    )
    try:
        trainer.fit(made, datamodule=data)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def single_stream_ddp() -> SingleStreamDDP:
    # gloo, since a process group of NCCL's cannot be made twice in a process on some machines.
    return SingleStreamDDP(gradient_as_bucket_view=True, process_group_backend="gloo", bucket_cap_mb=1)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("parallel", [False, True])
def test_nothing_is_compiled_in_training_steps(
    parallel: bool, corpus_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps of one or more micro-batches; under DDP with the graph split at its buckets. EMA reads the weights."""
    torch.compiler.reset()
    batches = BatchSettings(batch_tokens=400, max_tokens_per_device=160)
    data = TranslationDataModule(corpus_folder, batches, SPECIAL, seed=1)
    count = _CountCompilations()
    strategy = single_stream_ddp() if parallel else "auto"
    train_alone(data, module("cuda", compiled=True), strategy, MemoryProbe(data), EMA(decay=0.9), count)
    assert count.before > 0
    assert count.in_steps == 0
    assert capsys.readouterr().err.count("compiling the network") == 1


@pytest.mark.gpu
def test_ddp_uses_the_stream_of_training(corpus_folder: Path) -> None:
    """PyTorch warns where gradients are accumulated on another stream; a warning is an error here."""
    torch.set_warn_always(True)
    data = TranslationDataModule(corpus_folder, BatchSettings(batch_tokens=400), SPECIAL, seed=1)
    try:
        train_alone(data, module("cuda"), single_stream_ddp())
    finally:
        torch.set_warn_always(False)


@pytest.mark.parametrize("device", DEVICES)
def test_training_batches_are_in_memory_that_a_gpu_copies_by_itself(device: str, corpus_folder: Path) -> None:
    data = TranslationDataModule(corpus_folder, BatchSettings(batch_tokens=400, workers=1), SPECIAL, seed=1)
    for share in islice(data.train_dataloader(), 3):
        assert share.flat.is_pinned() == torch.cuda.is_available()
        assert share.to(device).flat.device.type == device


@pytest.mark.parametrize(("device", "layout"), [LAYOUTS[1], LAYOUTS[3], FLASH])
def test_kernels_of_packed_rows(device: str, layout: str) -> None:
    """The encoder and both attentions of the decoder take the kernel of the layout, forward and backward."""
    made = module_for(device, layout)
    [batch] = packed([LENGTHS[1]]).to(device).micro_batches
    with profile(activities=[ProfilerActivity.CPU]) as profiler, torch.autocast(device, torch.bfloat16):
        made.losses(batch).smoothed.backward()
    calls = Counter(event.name for event in profiler.events())
    flash = ["aten::_flash_attention_forward", "aten::_flash_attention_backward"]
    assert [calls[name] for name in flash] == [3 * (layout == "flash")] * 2
    assert bool(calls["aten::scaled_dot_product_attention"]) == (layout == "plain")


@pytest.mark.gpu
@pytest.mark.slow
def test_all_batches_of_a_gpu_share_one_graph() -> None:
    """Whatever their sentences are, and however many; eager results."""
    made, eager = module("cuda", compiled=True), module("cuda")
    draws = np.random.default_rng(1)
    micro_batches = [
        [(source, target) for source, target in draws.integers(2, 40, (count, 2)).tolist()] for count in range(1, 21)
    ]
    with Compilations() as compilations:
        for batch in packed(micro_batches).to("cuda").micro_batches:
            with torch.autocast("cuda", torch.bfloat16):
                found, expected = made.states(batch), eager.states(batch)
            found.sum().backward()
            assert (found - expected).norm() < 0.01 * expected.norm()
    assert compilations.num_graphs == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.slow
def test_compiled_terms_of_the_loss(device: str, dtype: torch.dtype) -> None:
    check_chunk_terms(dtype, "inductor", device)


def loss_and_gradient(
    made: TranslationModule, device: str, layout: str, low: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    made.zero_grad()
    total = torch.zeros((), device=device)
    batches: list[PaddedBatch] | list[PackedBatch] = [padded(lengths).to(device) for lengths in LENGTHS]
    if layout != "padded":  # the same random sentences
        batches = packed(LENGTHS).to(device).micro_batches
    for batch in batches:
        with torch.autocast(device, low, enabled=low is not None):
            sums = made.losses(batch)
        sums.smoothed.backward()
        total += sums.smoothed.detach()
    gradients = [parameter.grad.flatten() for parameter in made.parameters() if parameter.grad is not None]
    return total.cpu(), torch.cat(gradients).cpu()


@pytest.mark.parametrize(("device", "layout"), [*LAYOUTS, FLASH])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_stay_near_float32(device: str, layout: str, dtype: torch.dtype) -> None:
    exact, exact_gradient = loss_and_gradient(module("cpu"), "cpu", "padded")
    made = module_for(device, layout)
    low, low_gradient = loss_and_gradient(made, device, layout, dtype)
    torch.testing.assert_close(low, exact, rtol=0.005, atol=0)
    assert (low_gradient - exact_gradient).norm() < 0.03 * exact_gradient.norm()


@pytest.mark.parametrize(("device", "layout"), LAYOUTS)
def test_float32_is_the_cpus(device: str, layout: str) -> None:
    exact, exact_gradient = loss_and_gradient(module("cpu").double(), "cpu", "padded")
    made = module(device, precision="32-true")
    found, gradient = loss_and_gradient(made, device, layout)
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=0, check_dtype=False)
    assert (gradient - exact_gradient).norm() < 1e-4 * exact_gradient.norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=[pytest.mark.gpu, pytest.mark.slow])])
def test_the_loss_takes_a_small_share_of_memory(device: str, compiled: bool) -> None:
    """At the paper's size on a GPU, compiled and not. A small size on the CPU checks the measurement."""
    tokens, d_model, pieces = (25_000, 512, 37_000) if device == "cuda" else (4_000, 16, 9_000)
    weight = torch.randn(pieces, d_model, device=device, requires_grad=True)
    targets = torch.randint(0, pieces, (tokens,), device=device, dtype=torch.int32)
    states = torch.randn(tokens, d_model, device=device, requires_grad=True)
    terms = compiled_chunk_terms() if compiled else None
    memory = PeakMemory(torch.device(device))
    with torch.autocast(device, torch.bfloat16):
        smoothed = label_smoothed_loss(states, weight, targets, 0.1, PAD, chunk_terms=terms).smoothed
    smoothed.backward()
    peak = memory.read()
    # On a GPU a chunk has 1/64 of its memory; states, weight and their gradients are some 400 MB. Half of all logits
    # in float32 would exceed this on a CPU and on a GPU of up to 80 GB.
    most = tokens * pieces * 2
    if device == "cuda":
        most = torch.cuda.get_device_properties(0).total_memory // 64 + 400_000_000
    assert 2 * pieces * d_model < peak < most
    assert smoothed.isfinite()


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_more_logits_than_32_bits_count(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a chunk of all tokens, of which the last one alone is not padding."""
    tokens, pieces = 60_000, 37_000
    assert tokens * pieces > 2**31
    monkeypatch.setattr("model.loss._CHUNK_SHARE", 1.0)
    weight = torch.randn(pieces, 8, device="cuda").requires_grad_()
    states = torch.zeros(tokens, 8, device="cuda")
    states[-1], targets = 1.0, torch.full((tokens,), PAD, device="cuda")
    targets[-1] = 5
    terms = compiled_chunk_terms() if compiled else None
    with torch.autocast("cuda", torch.bfloat16):
        found = label_smoothed_loss(states, weight, targets, 0.1, PAD, chunk_terms=terms).smoothed
    exact = weight.detach().double().requires_grad_()
    expected = plain_loss(states[-1:].double(), exact, targets[-1:], 0.1, PAD)
    assert float(found) == pytest.approx(float(expected), rel=0.01)
    gradient, exact_gradient = torch.autograd.grad(found, weight)[0], torch.autograd.grad(expected, exact)[0]
    assert (gradient - exact_gradient).norm() < 0.02 * exact_gradient.norm()
