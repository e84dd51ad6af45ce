"""Options that `fit` chooses: precision, strategy and its launcher; and which Trainer keys a recipe may set."""

import logging
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.profilers import SimpleProfiler

from data_module.errors import InputError
from pipeline.__main__ import main
from pipeline.config.settings import max_seconds
from pipeline.doctor.start_checks import check_machine
from pipeline.runtime.console import lightning_noise_restored, quiet_lightning
from pipeline.runtime.devices import allow_tf32, best_precision
from pipeline.runtime.launch import JobStep
from pipeline.runtime.lightning_private import SingleStreamDDP, precision_plugin
from pipeline.training.trainer import strategy, trainer_options
from tests.conftest import ROOT, program


def test_bf16_on_cpus_that_support_it() -> None:
    has_bf16 = "avx512_bf16" in Path("/proc/cpuinfo").read_text()
    for accelerator in ("cpu",) if torch.cuda.is_available() else ("auto", "cpu"):
        assert best_precision(accelerator) == ("bf16-mixed" if has_bf16 else "32-true")


@pytest.mark.parametrize("accelerator", ["auto", "gpu", "cuda"])
@pytest.mark.parametrize(("native", "precision"), [(True, "bf16-mixed"), (False, "32-true")])
def test_bf16_on_gpus_that_support_it_natively(
    monkeypatch: pytest.MonkeyPatch, accelerator: str, native: bool, precision: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: native or including_emulation)
    assert best_precision(accelerator) == precision


def test_ddp_with_more_than_one_process() -> None:
    assert strategy({"accelerator": "cpu", "devices": 1}) == "auto"
    for options in ({"devices": 2}, {"devices": 1, "num_nodes": 3}, {"devices": "2", "strategy": "ddp"}):
        chosen = strategy({"accelerator": "cpu", **options})
        assert isinstance(chosen, SingleStreamDDP)
        assert chosen._ddp_kwargs == {"gradient_as_bucket_view": True}


def test_a_notebook_trains_on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert strategy({"accelerator": "cpu", "devices": 1}) == "auto"
    with pytest.raises(InputError, match=r"^trainer.devices: a notebook trains on one device, not 2; set it to 1"):
        strategy({"accelerator": "cpu", "devices": 2})


def test_help_names_the_page_that_lists_all_settings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "--help"])
    [page] = re.findall(r"docs/\S+\.md", capsys.readouterr().out)
    assert "\n| `run.keep_last` | integer |" in (ROOT / page).read_text()


def test_max_time() -> None:
    assert max_seconds(None) is None
    assert max_seconds("01:00:02:03") == 86_523
    assert max_seconds("00:00:00:00") == 0
    for wrong in ("45", "45 minutes", "216000", "9999999999:00:00:00"):
        with pytest.raises(InputError, match=r"trainer\.max_time .*00:00:45:00"):
            max_seconds(wrong)


def test_float32_on_gpus_uses_tf32(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    precisions_set = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", precisions_set.append)
    for capability, precision in (((7, 0), "32-true"), ((8, 0), "16-mixed"), ((8, 0), "32-true")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=capability: found)
        allow_tf32({"accelerator": "gpu", "precision": precision})
    assert precisions_set == ["high"]
    assert capsys.readouterr().err.count("matrix products use TF32; set NVIDIA_TF32_OVERRIDE=0") == 1


def test_float16_uses_no_grad_scaler() -> None:
    options = trainer_options({"accelerator": "cpu", "precision": "16-mixed"})
    plugin = precision_plugin(options)
    assert plugin.precision == "16-mixed"
    assert plugin.scaler is None
    assert precision_plugin({"precision": "bf16-mixed", "accelerator": "cpu"}) is None


def test_unusable_gpus_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "PYTORCH_NVML_BASED_CUDA_CHECK" not in os.environ  # It would make every counted GPU available.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)  # as counted by a driver that is too old
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for options in ({}, {"accelerator": "gpu"}):
        with pytest.raises(InputError, match=r"torch cannot use the 8 GPUs of this machine \(\S"):
            trainer_options(options)
    assert trainer_options({"accelerator": "cpu"})["accelerator"] == "cpu"
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    step = JobStep("1", rank=0, local_rank=0, num_tasks=8, num_nodes=1, tasks_per_node=8, restarts=0)
    results = {result.message: result.ok for result in check_machine(step)}
    assert [ok for message, ok in results.items() if message.startswith("torch sees 0 of the 8 GPUs")] == [False]
    assert any("8 GPUs that torch cannot use" in message for message in results)


def test_lightning_is_quiet_on_gpus(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Also if it is imported later, and then sets the level of its package. A profiler that is asked for reports."""
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # which Lightning sets
    with lightning_noise_restored():
        quiet_lightning()
        logging.getLogger("lightning.pytorch").setLevel(logging.INFO)
        CUDAAccelerator.set_nvidia_flags(0)
        assert caplog.records == []
        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
        with (profiler := SimpleProfiler()).profile("a step"):
            pass
        profiler.describe()
    assert ["a step" in record.getMessage() for record in caplog.records] == [True]


RANK_0 = """
import subprocess, sys, time
from pipeline.runtime.lightning_private import RankObserver
rank_1 = subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(3)"])
RankObserver([rank_1], patience_seconds={patience}).start()
rank_1.wait()
time.sleep({remaining})
sys.exit(2)
"""


@pytest.mark.parametrize(
    ("patience", "remaining", "code", "output"),
    [
        (60, 3, 2, ""),
        (0.1, 60, -signal.SIGKILL, "error: ended before the others: rank 1 with exit code 3; its output says why\n"),
    ],
)
def test_rank_0_ends_by_itself_or_is_killed(patience: float, remaining: float, code: int, output: str) -> None:
    script = RANK_0.format(patience=patience, remaining=remaining)
    done = program(script)
    assert (done.returncode, done.stderr.decode()) == (code, output)


def test_ranks_share_the_processors_of_their_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")  # Something else has started the ranks.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    options = {"accelerator": "cpu", "devices": 2}
    trainer = Trainer(logger=False, enable_checkpointing=False, strategy=strategy(options), **options)
    launcher = trainer.strategy.launcher
    assert launcher is not None
    assert launcher.launch(lambda: os.environ["OMP_NUM_THREADS"]) == "3"
    assert launcher.launch(lambda: os.environ["OMP_NUM_THREADS"]) == "3"
    assert chosen == [3]  # What is given by then stays.
