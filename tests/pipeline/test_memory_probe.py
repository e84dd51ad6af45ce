"""The largest micro-batches are tried before the first step, and nothing is left of the trial."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from data_module.batching.batch import SpecialIds
from data_module.settings import BatchSettings
from data_module.tokenization.tokenizer import Tokenizer
from data_module.translation_data_module import TranslationDataModule
from model.settings import DecodingSettings, NetworkSettings, TrainingSettings
from model.translation_module import TranslationModule
from pipeline.runtime.console import quiet_lightning
from pipeline.runtime.memory import host_memory_limit
from pipeline.training.memory_probe import MemoryProbe
from tests.conftest import ROOT, pipeline


class Look(Callback):
    """What a training step could depend on, each time training starts."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

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


class LiveBytes(TorchDispatchMode):
    """Notes the tensors that are made inside; counts the bytes of those still there, without views of what was."""

    def __init__(self) -> None:
        super().__init__()
        self.before: set[int] = set()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.before:
                    self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def count(self) -> int:
        return sum(size for storage, size in self._made.values() if not storage.expired())


class GradientsAndMoments(Callback):
    """Bytes that are there beside the weights: when the trial's last forward begins, and in training steps."""

    def __init__(self) -> None:
        self._live = LiveBytes()
        self.in_trial = self.in_steps = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stands before the trial, which is over when the first batch comes."""
        self._live.before = {weight.untyped_storage().data_ptr() for weight in pl_module.parameters()}
        self._live.__enter__()
        self._hook = pl_module.network.register_forward_pre_hook(self._note)

    def _note(self, *_: Any) -> None:
        self.in_trial = self._live.count()

    def on_train_batch_start(self, *_: Any) -> None:
        if self._hook.id in self._hook.hooks_dict_ref():
            self._hook.remove()
            self._live.__exit__(None, None, None)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        gradients = [weight.grad for weight in pl_module.parameters()]
        moments = [moment for state in trainer.optimizers[0].state.values() for moment in state.values()]
        self.in_steps = sum(tensor.nbytes for tensor in [*gradients, *moments])


def fit(tiny_corpus: Path, network: NetworkSettings, max_steps: int, *callbacks: Any) -> None:
    """Train; the trial of micro-batches of 400 tokens stands in the callbacks where they have None."""
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
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[callback or MemoryProbe(400, data.longest) for callback in callbacks],
    )
    trainer.fit(module, datamodule=data)


@pytest.mark.filterwarnings("ignore:.*transfer_batch_to_device.*")
def test_nothing_is_left_of_the_trial(tiny_corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = Look(), Look()
    fit(tiny_corpus, NetworkSettings(num_layers=1, d_model=16, d_ff=32, num_heads=2), 1, before, None, after)
    [first], [second] = before.seen, after.seen
    assert first["weights"].keys() == second["weights"].keys()
    for name, weight in first["weights"].items():
        assert torch.equal(weight, second["weights"][name]), name
    assert first["gradients"] == second["gradients"] == [None] * len(first["gradients"])
    assert first["optimizer"] == second["optimizer"] == 0
    assert torch.equal(first["random"], second["random"])
    assert first["data"] == second["data"]
    assert "with micro-batches of 400 tokens a side" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:.*transfer_batch_to_device.*")
def test_the_trial_takes_what_a_step_takes(tiny_corpus: Path) -> None:
    """Of gradients and of both of Adam's moments."""
    found = GradientsAndMoments()
    fit(tiny_corpus, NetworkSettings(num_layers=1, d_model=16, d_ff=2048, num_heads=2), 2, found, None)
    assert found.in_steps > 1_000_000
    assert found.in_trial == pytest.approx(found.in_steps, rel=0.1)


def test_what_cannot_fit_is_refused_before_the_first_step(recipe_file: Path, tmp_path: Path) -> None:
    """A job's limit that the process alone exceeds (torch for GPUs takes 0.9 GB), and one that 100,000 tokens do."""
    run = tmp_path / "run"
    options = ["--config", recipe_file, "--run.folder", run]
    none = pipeline("fit", *options, environment={"SLURM_MEM_PER_NODE": "100"})
    assert none.returncode == 2
    assert b"ask for more memory" in none.stderr.splitlines()[-1]
    large = ["--batches.max_tokens_per_device", 100_000, "--batches.group_tokens", 100_000]
    few = pipeline(
        *("fit", *options, *large, "--batches.batch_tokens", 100_000, "--network.d_ff", 4096),
        environment={"SLURM_MEM_PER_CPU": "700", "SLURM_CPUS_ON_NODE": "2"},
    )
    assert few.returncode == 2
    [*_, said] = few.stderr.decode().splitlines()
    assert "micro-batches of 100000 tokens a side need about" in said
    assert "this job has 1.5; set it to " in said
    assert b"Traceback" not in few.stderr
    assert not list(run.glob("checkpoints/*.ckpt"))


def test_the_lowest_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = host_memory_limit(1)
    monkeypatch.setenv("SLURM_MEM_PER_NODE", str(1 << 30))  # more than there is
    assert host_memory_limit(1) == machine
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "0")  # all of the node
    assert host_memory_limit(1) == machine
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "64")
    assert host_memory_limit(1) == (64 << 20, "this job")
    assert host_memory_limit(4) == (16 << 20, "each of the 4 processes on this job")


def test_memory_that_was_kept_is_given_back() -> None:
    """In a process of its own: blocks that are freed one by one leave gaps, which only the second call returns."""
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
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True, text=True)
    freed, left = map(int, done.stdout.split())
    assert freed > 400e6
    assert left < 100e6
