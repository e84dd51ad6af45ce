"""The Triton kernels: their results, in Triton's interpreter, and what they use of GPUs that are not here."""

import os
import re
import subprocess
import sys
from importlib.metadata import version
from itertools import product
from pathlib import Path

import pytest
import torch

from model.fast.triton_check import LARGEST_HEAD, can_run, failure
from tests.conftest import ROOT
from tests.model.kernel_builds import KERNELS, Options, build_attention, build_loss

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Compute capability (A100; H100, H200; B200) -> shared memory of a program, by CUDA's programming guide."""


def release(package: str) -> tuple[int, ...]:
    return tuple(map(int, version(package).split(".")[:2]))


@pytest.mark.skipif(
    release("triton") < (3, 7) and release("numpy") >= (2, 4),
    reason="Triton's interpreter before 3.7 cannot count in a loop with NumPy 2.4",
)
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
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.usefixtures("_empty_cache")
@pytest.mark.parametrize("vocabulary_size", [37_000, 58_102])
@pytest.mark.parametrize("of_pairs", [False, True])
def test_the_loss_reads_and_writes_16_bytes_at_a_time(of_pairs: bool, vocabulary_size: int) -> None:
    """Other accesses are of numbers that a row, or a pair of rows, has once. Four programs fit a multiprocessor."""
    build = build_loss(vocabulary_size, torch.bfloat16, True, 90, of_pairs)
    targets, target_logits, results = (1, 2, 7) if of_pairs else (1, 1, 3)
    assert build.accesses == {128: 6, 64: targets, 32: results, 16: target_logits}
    assert build.registers <= 64
    # The offset of a row exceeds 32 bits.
    products = re.findall(r"arith\.muli .* : (\S+)", build.ttir)
    assert products
    assert set(products) == {"i64"}


@pytest.mark.usefixtures("_empty_cache")
@pytest.mark.parametrize("name", KERNELS)
def test_attention_reads_and_writes_16_bytes_at_a_time(name: str) -> None:
    """Numbers of 32 bits are ids, offsets and sums of a row, those of 64 bits the state of dropout."""
    build = build_attention(name, Options(64, torch.bfloat16, True, True), 90)
    assert set(build.accesses) == {128, 64, 32}
    assert build.accesses[128] == 24
    # Distances between rows are multiplied by rows in 64 bits.
    _, *lines = build.ttir.split("attributes {noinline")
    uses = re.findall(r"= (.*)%(?:query|key|result)_stride\b(.*) loc", lines[0])
    assert len(uses) >= 3
    assert all(use == ("arith.extsi ", " : i32 to i64") for use in uses), uses


@pytest.mark.slow
@pytest.mark.usefixtures("_empty_cache")
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_no_kernel_spills_registers(capability: int) -> None:
    """Except in float32: with dropout, by at most 40 bytes, and one of the largest heads in full precision, by 16."""
    sizes, either = (32, 64, 128), (False, True)
    variants = [Options(64, torch.float16, True, True)]
    if capability == 100:  # Compiling takes long: the type that most train in, with all that a kernel may have.
        variants += [Options(size, torch.bfloat16, True, True) for size in sizes]
    else:
        variants += [Options(size, torch.bfloat16, *flags) for size in sizes for flags in product(either, either)]
        variants += [
            Options(size, torch.float32, True, *rest) for size in sizes for rest in product(either, ("tf32", "ieee"))
        ]
    for options in variants:
        for name in KERNELS:
            build = build_attention(name, options, capability)
            assert build.shared <= SHARED_BYTES[capability]
            allowed = 40 * (options.has_dropout and options.dtype == torch.float32)
            if (name, options.size, options.precision) == ("backward, queries", 128, "ieee"):
                allowed = max(allowed, 16)
            assert build.spilled <= allowed, (name, options)
    for dtype, has_gradient, of_pairs in product((torch.bfloat16, torch.float32), either, either):
        assert build_loss(37_000, dtype, has_gradient, capability, of_pairs).spilled == 0
