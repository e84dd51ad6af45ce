"""The Triton kernels: their results, in Triton's interpreter, and what they use of GPUs that are not here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from model.fast.triton_check import LARGEST_HEAD, can_run, failure
from tests.conftest import ROOT
from tests.model.kernel_builds import KERNELS, Options, attention_usage, loss_usage

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Compute capability (A100; H100, H200; B200) -> shared memory of a program, by CUDA's programming guide."""


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


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_no_kernel_spills_registers(capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Except one of the largest heads in float32 with products in full precision, by at most 16 bytes."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kinds = [(size, torch.bfloat16) for size in (32, 64, 128)] + [(64, torch.float16)]
    variants = [Options(*kind, causal, drop) for kind in kinds for causal in (True, False) for drop in (False, True)]
    variants += [
        Options(size, torch.float32, True, drop, precision)
        for size in (32, 64, 128)
        for drop in (False, True)
        for precision in ("tf32", "ieee")
    ]
    for options in variants:
        for name in KERNELS:
            usage = attention_usage(name, options, capability)
            assert usage.shared <= SHARED_BYTES[capability]
            is_excepted = (name, options.size, options.precision) == ("backward, queries", 128, "ieee")
            assert usage.spilled <= 16 * is_excepted, (name, options)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for has_gradient in (False, True):
            for of_pairs in (False, True):
                assert loss_usage(dtype, has_gradient, capability, of_pairs).spilled == 0
