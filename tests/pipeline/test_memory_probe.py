"""The memory probe runs the largest micro-batches before the first step and restores all state afterwards."""

import errno
import gc
import inspect
import multiprocessing
import re
import resource
import shutil
import signal
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch._inductor.exc import InductorError

from data_module.batch import SpecialIds
from data_module.errors import InputError
from data_module.settings import BatchSettings
from data_module.system.files import PlainValues
from data_module.tokenization.tokenizer import Tokenizer
from data_module.translation_data_module import TranslationDataModule
from model.settings import DecodingSettings, NetworkSettings, TrainingSettings
from model.training_module import TranslationModule
from model.transformer import Transformer
from pipeline.checkpointing.checkpoint_io import AtomicCheckpointIO
from pipeline.config.recipe import load_recipe
from pipeline.doctor import start_checks
from pipeline.runtime import signals
from pipeline.runtime.console import Failure, quiet_lightning
from pipeline.runtime.memory import MemoryLimit, host_memory_limit, peak_during, release_freed_memory
from pipeline.training import memory_probe, out_of_memory
from pipeline.training.build import build_callbacks
from pipeline.training.memory_probe import MemoryProbe
from pipeline.training.start import Plan
from tests.conftest import ALONE, fit_recipe, program, refusal


class RecordState(Callback):
    def __init__(self) -> None:
        self.seen: list[PlainValues] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen.append(
            {
                "weights": {name: weight.clone() for name, weight in pl_module.state_dict().items()},
                "gradients": [parameter.grad for parameter in pl_module.parameters()],
                "optimizer": len(trainer.optimizers[0].state),
                "random": torch.get_rng_state(),
                "data": trainer.train_dataloader.state_dict(),
            }
        )


SMALL = NetworkSettings(num_layers=1, d_model=16, d_ff=32, num_heads=2)


def fit(
    tiny_corpus: Path,
    network: NetworkSettings,
    max_steps: int,
    *callbacks: Callback | None,
    writer: AtomicCheckpointIO | None = None,
) -> None:
    """Train with the given callbacks, where None stands for a probe."""
    quiet_lightning()
    tokenizer = Tokenizer.load(tiny_corpus / "tokenizer.model")
    special = SpecialIds(pad=tokenizer.pad_id, bos=tokenizer.bos_id, eos=tokenizer.eos_id)
    module = TranslationModule(
        tokenizer.vocabulary_size, special, network, TrainingSettings(), DecodingSettings(), seed=1
    )
    data = TranslationDataModule(tiny_corpus, BatchSettings(batch_tokens=400, workers=0), special, seed=1)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=max_steps,
        limit_val_batches=0,
        callbacks=[callback or MemoryProbe(data) for callback in callbacks],
        plugins=[writer or AtomicCheckpointIO()],
        **ALONE,
    )
    trainer.fit(module, datamodule=data)


def test_the_probe_restores_all_state(tiny_corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = RecordState(), RecordState()
    fit(tiny_corpus, SMALL, 1, before, None, after)
    [first], [second] = before.seen, after.seen
    assert first["weights"].keys() == second["weights"].keys()
    for name, weight in first["weights"].items():
        assert torch.equal(weight, second["weights"][name]), name
    assert first["gradients"] == second["gradients"] == [None] * len(first["gradients"])
    assert first["optimizer"] == second["optimizer"] == 0
    assert torch.equal(first["random"], second["random"])
    assert first["data"] == second["data"]
    assert "with micro-batches of 512 tokens a side" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("limit", "tried", "message"),
    [
        (2.7, [1, 2, 8], None),
        (2.5, [1, 2], "need about 2.6 GB, and this test has 2.5; set it to 400 or less"),
        (1.1, [1, 2], "need about 2.6 GB, and this test has 1.1; ask for more memory"),
    ],
)
def test_the_whole_is_not_tried_if_it_would_not_fit(
    tiny_corpus: Path, monkeypatch: pytest.MonkeyPatch, limit: float, tried: list[int], message: str | None
) -> None:
    """Of a network that takes 1 GB, and 0.2 GB more for each eighth of a micro-batch. The system would kill it."""
    seen: list[int] = []

    def peak(work: partial[None]) -> int:
        seen.append(8 // work.args[-1])
        return 10**9 + seen[-1] * 2 * 10**8

    monkeypatch.setattr("pipeline.training.memory_probe.peak_during", peak)
    memory = MemoryLimit(int(limit * 1e9), "this test")
    monkeypatch.setattr("pipeline.training.memory_probe.host_memory_limit", lambda processes: memory)
    with nullcontext() if message is None else pytest.raises(InputError, match=message):
        fit(tiny_corpus, SMALL, 1, None)
    assert seen == tried


def test_a_part_that_runs_out_of_memory(tiny_corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part before it fits. The limit on a process's addresses is no limit on what is resident."""
    for largest, way_out in (
        (2, "set it to 100 or less (the global batch stays the same)"),
        (0, "ask for more memory"),
    ):

        def peak(work: partial[None], largest: int = largest) -> int:
            if 8 // work.args[-1] > largest:
                raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes")
            return 1

        monkeypatch.setattr("pipeline.training.memory_probe.peak_during", peak)
        with pytest.raises(InputError) as refused:
            fit(tiny_corpus, SMALL, 1, None)
        problem = (
            "micro-batches of 512 tokens a side do not fit (DefaultCPUAllocator: can't allocate memory: you tried 9"
        )
        assert f"{problem} bytes); {way_out}" in str(refused.value)


def test_memory_that_runs_out_in_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor raises its own error in place of PyTorch's. A GPU as far as PyTorch is asked about it."""
    found = {"mem_get_info": (6 * 10**9, 8 * 10**9), "memory_reserved": 0, "memory_allocated": 10**9}
    for name, value in found.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    probe = MemoryProbe(SimpleNamespace(longest=10))
    probe._tokens = 1000
    module = SimpleNamespace(device=torch.device("cuda"), compiled_forward=len)
    for text, expected in (
        (
            "CUDA out of memory. Tried to allocate 2 GiB",
            (InputError, r"GPU \(of 8 GB\) has 6\.0; set it to 400 or less"),
        ),
        ("no such instruction", (InductorError, "RuntimeError: no such instruction")),
    ):
        steps = Mock(side_effect=InductorError(RuntimeError(text), inspect.currentframe()))
        monkeypatch.setattr(probe, "_steps", steps)
        with pytest.raises(expected[0], match=expected[1]):
            probe._on_gpu(SimpleNamespace(), module)


def test_the_probe_takes_the_share_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a node with three ranks."""
    asked: list[int] = []
    monkeypatch.setattr(memory_probe, "host_memory_limit", lambda count: asked.append(count) or MemoryLimit(9, "this"))
    monkeypatch.setattr(memory_probe, "peak_during", lambda _: 1)
    monkeypatch.setattr(memory_probe, "checkpoint_io", lambda _: AtomicCheckpointIO())
    trainer = SimpleNamespace(num_devices=3, world_size=6)
    MemoryProbe(None)._on_cpu(trainer, torch.nn.Identity())  # type: ignore[arg-type]
    assert asked == [3]


def test_gradients_and_moments_are_in_memory_while_it_is_measured(
    tiny_corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each weight: itself, its gradient and both of Adam's moments."""
    counts: list[Counter[torch.Size]] = []

    def count(work: partial[None]) -> int:
        work()
        if work.args[-1] > 1:  # not the whole micro-batch
            return 1
        tensors = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
        gradients = [one.grad for one in tensors if type(one) is torch.nn.Parameter and one.grad is not None]
        unique = {id(one): one.shape for one in [*tensors, *gradients]}
        counts.append(Counter(unique.values()))
        return 1

    gc.collect()
    monkeypatch.setattr("pipeline.training.memory_probe.peak_during", count)
    fit(tiny_corpus, NetworkSettings(num_layers=1, d_model=26, d_ff=34, num_heads=2), 1, None)
    assert counts[-1][torch.Size([34, 26])] == 4 * 2  # of the first linear layer of encoder and decoder


@pytest.mark.parametrize(("room", "reported"), [(20_000, 3.6), (550, 1.5)])
def test_the_copy_for_checkpoints_is_counted_and_given_up_where_it_does_not_fit(
    tiny_corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], room: int, reported: float
) -> None:
    """600 MB beside a network that takes 1 GB, where there are so many MB more.

    The process may keep three times what it takes, or 95 % of the limit; the copy, not yet made, counts once.
    """
    limit = MemoryLimit(10**9 + (room << 20), "this test")
    monkeypatch.setattr("pipeline.training.memory_probe.host_memory_limit", lambda processes: limit)
    monkeypatch.setattr("pipeline.training.memory_probe.peak_during", lambda work: work() or 10**9)
    writer = AtomicCheckpointIO()
    writer.copy.plan(600 << 20, processes=1)
    probe = RecordCopy(writer)
    fit(tiny_corpus, SMALL, 1, None, probe, writer=writer)
    assert probe.seen == [600 << 20 if room > 600 else 0]
    assert f"memory: at most {reported} of {limit.size / 1e9:.1f} GB" in capsys.readouterr().err


def test_the_peak_is_that_of_the_work_alone() -> None:
    peak = peak_during(lambda: torch.ones(50 << 20))
    release_freed_memory()  # which an earlier test may have let this process keep
    assert peak - peak_during(lambda: None) > 150 << 20


class RecordCopy(Callback):
    def __init__(self, writer: AtomicCheckpointIO) -> None:
        self.writer = writer
        self.seen: list[int] = []

    def on_train_start(self, *_: object) -> None:
        self.seen.append(self.writer.copy.size)


def test_a_run_is_not_removed_for_one_that_does_not_fit(
    recipe_file: Path, trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained_run, run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "100")
    line = refusal("fit", recipe_file, "--run.folder", run, "--fresh")
    assert line.endswith("; ask for more memory, or train a smaller network")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_the_lowest_limit_applies(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = host_memory_limit(1)
    monkeypatch.setenv("SLURM_MEM_PER_NODE", str(1 << 30))  # more than the machine has
    assert host_memory_limit(1) == machine
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "0")  # all memory of the node
    assert host_memory_limit(1) == machine
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "64")
    assert host_memory_limit(1) == (64 << 20, "this job")
    assert host_memory_limit(4) == (16 << 20, "each of the 4 processes on this job")
    monkeypatch.delenv("SLURM_MEM_PER_NODE")
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "20")
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "3")
    assert host_memory_limit(1) == (60 << 20, "this job")
    # A limit of the process itself is not shared.
    for kind, name in ((resource.RLIMIT_AS, "v"), (resource.RLIMIT_DATA, "d")):
        limits = {kind: (14 << 20, 99 << 20)}
        monkeypatch.setattr(resource, "getrlimit", lambda asked, own=limits: own.get(asked, (resource.RLIM_INFINITY,)))
        assert host_memory_limit(1) == host_memory_limit(4) == (14 << 20, f"this process (ulimit -{name})")
        assert host_memory_limit(5).size == 12 << 20


@pytest.mark.parametrize(("precision", "needed"), [("32-true", 16), ("bf16-mixed", 16), ("64-true", 32)])
def test_what_weights_gradients_and_moments_need(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch, precision: str, needed: int
) -> None:
    """Of each weight: itself, its gradient and both of Adam's moments. A network that fits just so is not refused."""
    recipe = load_recipe([recipe_file], ["--trainer.precision", precision, "--trainer.devices", "2"])
    count = sum(weight.numel() for weight in Transformer(60, recipe.network).parameters())

    def limit_of(size: int, ranks: int) -> MemoryLimit:
        return MemoryLimit(size, f"each of {ranks}")

    for size, fits in ((needed * count, False), (needed * count + 1, True)):
        monkeypatch.setattr(out_of_memory, "host_memory_limit", partial(limit_of, size))
        message = "^network: weights, gradients and moments need 0.0 GB, and each of 2 has 0.0; ask for"
        with nullcontext() if fits else pytest.raises(InputError, match=message):
            start_checks.check_memory(Plan(recipe, None, False))


class KillLoader(Callback):
    """Kills a loader process in the fifth step."""

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        if trainer.global_step == 5:
            multiprocessing.active_children()[0].kill()


def test_a_killed_loader_process_is_told_in_one_line(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_killer(*given: object) -> list[Callback]:
        return [KillLoader(), *build_callbacks(*given)]  # type: ignore[arg-type]

    monkeypatch.setattr("pipeline.fit.build_callbacks", with_killer)
    words = ["--run.folder", str(tmp_path / "run"), "--batches.workers", "2", "--trainer.max_steps", "400"]
    with pytest.raises(Failure) as failed:
        fit_recipe(load_recipe([recipe_file], words))
    # On a slow machine the batches that the process has made are trained first, four of its own and four of the other.
    last = max(int(path.stem[5:]) for path in (tmp_path / "run" / "checkpoints").glob("step=*.ckpt"))
    assert re.fullmatch(
        r"a loader process \(batches\.workers 2\) (is killed by signal: Killed|exited unexpectedly), as when memory "
        rf"runs out; ask for more memory, or lower batches\.workers; the run resumes from step {last}",
        str(failed.value),
    )
    assert 4 <= last <= 13


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"), "out of memory (DefaultCPUA"),
        (RuntimeError("CUDA out of memory. Tried to allocate 9 GiB"), "out of memory (CUDA out of memory. Tried to"),
        (MemoryError(), "out of memory (MemoryError): weights, gradients and moments need 0.0 GB, and this"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out of memory ([Errno 12] Cannot allocate memory): weights"),
        (
            RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "),
            "a loader process (batches.workers 0)",
        ),
        (RuntimeError("a bug"), None),
        (OSError(errno.EIO, "Input/output error"), None),
    ],
)
def test_failures_while_the_network_is_built(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, line: str | None
) -> None:
    """Signals end the process meanwhile."""

    def build(*_: object) -> None:
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        raise error

    monkeypatch.setattr("pipeline.fit.build_module", build)
    signals.install()
    with pytest.raises(type(error) if line is None else Failure) as failed:
        fit_recipe(load_recipe([recipe_file], ["--run.folder", str(tmp_path / "run")]))
    assert signal.getsignal(signal.SIGTERM) is signals.record
    if line is None:
        assert failed.value is error
    else:
        assert str(failed.value).startswith(line)
        assert str(failed.value).endswith("; the run begins again, since no checkpoint was written")


def test_freed_memory_is_released() -> None:
    """In a new process. Freed blocks leave gaps, which only `release_freed_memory` returns to the system."""
    code = """
import torch
from pipeline.runtime.memory import release_freed_memory, keep_freed_memory, private_memory
keep_freed_memory()
before = private_memory()
blocks = [torch.ones(size) for _ in range(100) for size in (1 << 20, 1 << 14)]
kept = blocks[1::2]
del blocks
freed = private_memory() - before
release_freed_memory()
print(freed, private_memory() - before)
"""
    done = program(code)
    assert done.returncode == 0, done.stderr.decode()
    freed, left = map(int, done.stdout.split())
    assert freed > 400e6
    assert left < 100e6
