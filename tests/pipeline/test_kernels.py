"""Which kernels `fit` chooses, and what it says where its own cannot run."""

import sys
from pathlib import Path

import pytest
import torch

import model.fast
from data_module.errors import InputError
from data_module.tokenization.tokenizer import Tokenizer
from model.settings import NetworkSettings
from pipeline.config.recipe import load_recipe
from pipeline.training.build import build_data, build_module
from pipeline.training.kernels import choose_kernels, choose_loss
from tests.conftest import pipeline
from tests.integration.runs import scalars

ON_GPU = {"accelerator": "gpu", "precision": "bf16-mixed"}
NETWORK = NetworkSettings()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A GPU as far as PyTorch is asked about it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "This GPU")
    return monkeypatch


def assert_impossible(obstacle: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Null: PyTorch's kernels and one line. Requested: refused."""
    assert choose_kernels(None, ON_GPU, NETWORK) == "pytorch"
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("training with PyTorch's kernels instead of Triton's: ")
    assert obstacle in line
    with pytest.raises(InputError) as refused:
        choose_kernels("triton", ON_GPU, NETWORK)
    assert obstacle in str(refused.value)
    assert str(refused.value).endswith("; set it to pytorch, or to null")
    assert choose_kernels("pytorch", ON_GPU, NETWORK) == "pytorch"
    assert capsys.readouterr().err == ""


def test_an_older_gpu(gpu: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    gpu.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert_impossible("compute capability 8.0, and This GPU has 7.5", capsys)


def test_each_process_asks_its_own_gpu(gpu: pytest.MonkeyPatch) -> None:
    """Only the third GPU is an older one."""
    gpu.setattr(torch.cuda, "device_count", lambda: 4)
    gpu.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5) if device == 2 else (9, 0))
    gpu.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device}")
    gpu.setenv("PATH", "")
    gpu.delenv("CC", raising=False)
    for name, rank, devices, is_old in (
        ("LOCAL_RANK", "2", 4, True),
        ("LOCAL_RANK", "1", "auto", False),
        ("SLURM_LOCALID", "2", "auto", True),
        ("LOCAL_RANK", "1", [0, 2], True),
        ("LOCAL_RANK", "1", "3,2", True),
        ("LOCAL_RANK", "2", [2, 0], False),  # a mistake, which Lightning reports
    ):
        with gpu.context() as environment:
            environment.setenv(name, rank)
            with pytest.raises(InputError) as refused:
                choose_kernels("triton", {**ON_GPU, "devices": devices}, NETWORK)
        assert ("GPU 2 has 7.5" in str(refused.value)) == is_old


def test_no_compiler(gpu: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    gpu.delenv("CC", raising=False)
    gpu.setenv("PATH", "")
    assert_impossible("Triton needs one of gcc, clang, or CC set to a compiler", capsys)


def test_no_triton(gpu: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where it is installed, it cannot be imported any more."""
    gpu.setitem(sys.modules, "triton", None)
    for name in ("triton_attention", "triton_loss", "triton_check"):
        gpu.delitem(sys.modules, f"model.fast.{name}", raising=False)
        gpu.delattr(model.fast, name, raising=False)
    assert_impossible("Triton is not installed or does not work", capsys)


def test_a_cpu(capsys: pytest.CaptureFixture[str], recipe_file: Path, tmp_path: Path) -> None:
    """Has no Triton kernels: `fit` and `doctor` refuse them."""
    for requested in (None, "pytorch"):
        assert choose_kernels(requested, {"accelerator": "cpu", "precision": "32-true"}, NETWORK) == "pytorch"
    assert capsys.readouterr().err == ""
    message = "run.kernels triton: they need a GPU; set it to pytorch, or to null"
    arguments = ["--config", recipe_file, "--run.folder", tmp_path / "run", "--run.kernels"]
    refused = pipeline("fit", *arguments, "triton")
    assert refused.returncode == 2
    assert message in refused.stderr.decode().splitlines()[-1]
    assert not (tmp_path / "run" / "checkpoints").exists()
    doctor = pipeline("doctor", *arguments, "triton")
    assert doctor.returncode == 1
    assert message in doctor.stdout.decode()
    assert "kernels" not in pipeline("doctor", *arguments, "pytorch").stdout.decode()


@pytest.mark.parametrize(
    ("accelerator", "precision", "requested", "expected"),
    [
        ("cpu", "bf16-mixed", None, True),
        ("cpu", "32-true", None, True),
        ("cpu", "32-true", "pytorch", False),
        ("cpu", "64-true", None, False),
        ("cpu", "16-mixed", None, False),
        ("gpu", "bf16-mixed", None, False),
    ],
)
def test_where_the_loss_is_compiled(
    accelerator: str, precision: str, requested: str | None, expected: bool, recipe_file: Path
) -> None:
    loss = choose_loss(requested, {"accelerator": accelerator, "precision": precision})
    assert (loss is not None) == expected
    recipe = load_recipe([recipe_file], [])
    tokenizer = Tokenizer.load(recipe.corpus_folder() / "tokenizer.model")
    assert build_module(recipe, tokenizer, compiled_loss=loss).loss_kernels is (loss or "pytorch")


def test_training_with_the_compiled_loss_is_training_with_pytorchs(recipe_file: Path, tmp_path: Path) -> None:
    """To rounding, in training and validation, in which every figure differs in some digit."""
    losses = {}
    for name, options in (("compiled", []), ("pytorch", ["--run.kernels", "pytorch"])):
        run = tmp_path / name
        options = [
            *options,
            "--run.folder",
            run,
            "--run.log_every_steps",
            1,
            "--training.r_drop_alpha",
            2,
            "--network.dropout",
            0.1,
        ]
        done = pipeline("fit", "--config", recipe_file, *options, "--trainer.precision", "32-true")
        assert done.returncode == 0, done.stderr.decode()
        losses[name] = [value for tag in ("train/loss", "validation/loss") for _, value in scalars(run, tag)]
    assert len(losses["compiled"]) > 3
    assert losses["compiled"] == pytest.approx(losses["pytorch"], rel=1e-4)
    assert losses["compiled"] != losses["pytorch"]


def test_the_choice_reaches_module_and_data(recipe_file: Path) -> None:
    recipe = load_recipe([recipe_file], [])
    tokenizer = Tokenizer.load(recipe.corpus_folder() / "tokenizer.model")
    options = {"accelerator": "gpu", "precision": "32-true"}  # flash attention does not take float32
    for kernels in ("triton", "pytorch"):
        assert build_module(recipe, tokenizer, kernels=kernels).kernels == kernels
        assert build_data(recipe, tokenizer, options, kernels).in_blocks == (kernels == "pytorch")
