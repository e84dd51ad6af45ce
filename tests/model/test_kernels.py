"""The Triton kernels: their results, in Triton's interpreter, and what they use of GPUs that are not here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from model.gpu import segment_kernels
from model.gpu.segment_kernels import LARGEST_HEAD, can_run
from model.gpu.self_check import failure
from tests.conftest import ROOT
from tests.model.kernel_builds import (
    GPUS,
    KERNELS,
    PAGE,
    Options,
    attention_usage,
    float32,
    loss_usage,
    sixteen_bits,
    updated,
)

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Shared memory that a program may have on each GPU, by CUDA's programming guide."""


def test_results_in_the_interpreter() -> None:
    """Runs `interpreted_kernels.py`, whose report is shown if a test fails."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "TRITON"))}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, "tests/model/interpreted_kernels.py"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"


def test_which_heads_the_kernels_take() -> None:
    assert LARGEST_HEAD == 128
    assert all(can_run(*sizes) for sizes in [(64, 64), (1, 128), (128, 1), (5, 7)])
    assert not any(can_run(*sizes) for sizes in [(129, 64), (64, 129), (256, 256)])


@pytest.mark.skipif(torch.cuda.is_available(), reason="here the kernels run")
def test_the_check_before_training_says_that_kernels_do_not_run() -> None:
    said = failure(torch.bfloat16, 8, 64, 64)
    assert said is not None
    assert said.startswith("Triton's kernels do not run here: ")
    assert "\n" not in said


@pytest.fixture
def _cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def spills(options: list[Options], capability: int) -> dict[tuple[str, Options], int]:
    """Compile all kernels, and return the bytes that are spilled by those that spill."""
    found = {}
    for one in options:
        for name in KERNELS:
            usage = attention_usage(name, one, capability)
            assert usage.shared <= SHARED_BYTES[capability]
            assert usage.registers <= 255
            if usage.spilled:
                found[name, one] = usage.spilled
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("_cache_of_its_own")
@pytest.mark.parametrize("capability", GPUS)
def test_no_kernel_spills_registers(capability: int) -> None:
    """Except one of the largest heads in float32 with products in full precision, by at most 16 bytes."""
    assert spills(sixteen_bits(), capability) == {}
    for (name, options), size in spills(float32(), capability).items():
        assert (name, options.size, options.precision) == ("backward, queries", 128, "ieee")
        assert size <= 16
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for has_gradient in (False, True):
            for of_pairs in (False, True):
                assert loss_usage(dtype, has_gradient, capability, of_pairs).spilled == 0


@pytest.mark.slow
@pytest.mark.usefixtures("_cache_of_its_own")
def test_the_documentation_has_these_figures() -> None:
    """If it fails, run `python -m tests.model.kernel_builds`."""
    page = PAGE.read_text(encoding="utf-8")
    assert "<!-- kernels -->" in page
    assert updated(page) == page


@pytest.mark.usefixtures("_cache_of_its_own")
def test_a_kernel_that_spills_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that are too large for the registers."""
    large = {"QUERIES": 128, "KEYS": 128, "num_warps": 4, "num_stages": 1}
    monkeypatch.setattr(segment_kernels, "tiles", lambda *_: dict(large))
    options = Options(128, torch.bfloat16, False)
    assert attention_usage.__wrapped__("backward, keys", options, 90).spilled > 0
