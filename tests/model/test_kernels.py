"""The Triton kernels: their results, in Triton's interpreter, and their compilation for GPUs that are not here."""

import os
import re
import subprocess
import sys
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from model.fast import triton_attention, triton_loss
from model.fast.triton_check import LARGEST_HEAD, can_run, failure
from model.loss import _projection
from tests.conftest import ROOT

KERNELS = {
    "forward": triton_attention._forward,
    "backward, queries": triton_attention._backward_queries,
    "backward, keys": triton_attention._backward_keys,
}
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Compute capability (A100; H100, H200; B200) -> shared memory of a program, by CUDA's programming guide."""
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class Build(NamedTuple):
    shared: int
    """Bytes of shared memory of a program."""
    ttir: str
    """Triton's own code of the kernel."""


class Options(NamedTuple):
    """A variant of the attention kernels."""

    size: int
    """d_k and d_v."""
    dtype: torch.dtype
    is_causal: bool = True
    has_dropout: bool = False
    precision: str = "tf32"
    """Of products in float32."""


def build_attention(name: str, options: Options, capability: int) -> Build:
    """Compile a kernel of `KERNELS` for a compute capability."""
    kernel, pointer = KERNELS[name], "*" + TYPES[options.dtype]
    types = dict.fromkeys(kernel.arg_names, pointer)
    types |= dict.fromkeys(("log_sums", "products"), "*fp32")
    types |= dict.fromkeys(("query_ids", "key_ids", "key_offsets", "query_offsets"), "*i32")
    sizes = ("num_queries", "num_keys", "num_segments", "num_heads")
    types |= dict.fromkeys((*sizes, "query_stride", "key_stride", "result_stride", "key_column", "value_column"), "i32")
    types |= {"dropout": "*i64"}
    tiles = triton_attention.tiles(kernel, options.size, options.size, options.dtype)
    launch = {key: tiles.pop(key) for key in ("num_warps", "num_stages")}
    block = triton_attention._block(options.size)
    constants = {
        **{"D_K": options.size, "D_V": options.size, "BLOCK_K": block, "BLOCK_V": block},
        **{"IS_CAUSAL": options.is_causal, "HAS_DROPOUT": options.has_dropout},
        **{"UPCAST": False, "PRECISION": options.precision, **tiles},
        "SCALE": 0.125,
    }
    return _build(kernel, types, constants, launch, capability)


def build_loss(
    vocabulary_size: int, dtype: torch.dtype, has_gradient: bool, capability: int, of_pairs: bool = False
) -> Build:
    kernel = triton_loss._row_pair if of_pairs else triton_loss._row
    types = dict.fromkeys(kernel.arg_names, "*fp32")
    types |= {"logits": "*" + TYPES[dtype], "targets": "*i64", "epsilon": "fp32", "alpha": "fp32"}
    weight = torch.empty(vocabulary_size, 1, device="meta")
    constants = {
        "VOCABULARY_SIZE": vocabulary_size,
        "STRIDE": _projection(weight, dtype, triton_loss.TRITON_LOSS).size(0),
        "HAS_GRADIENT": has_gradient,
        "BLOCK": triton_loss._BLOCK // (2 if of_pairs else 1),
    }
    return _build(kernel, types, constants, {"num_warps": 8}, capability)


def _build(
    kernel: JITFunction, types: dict[str, str], constants: dict[str, int], launch: dict[str, int], capability: int
) -> Build:
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    # What a launch knows of tensors, and of widths that are multiples of 16.
    aligned = [name for name in names if signature[name].startswith("*") or name.endswith(("stride", "column"))]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=values, attrs=attributes)
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch)
    assert built.asm["cubin"]
    return Build(built.metadata.shared, built.asm["ttir"])


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="here the kernels run")
def test_the_check_before_training_says_that_heads_are_too_large_or_that_kernels_do_not_run() -> None:
    assert LARGEST_HEAD == 128
    assert [can_run(*sizes) for sizes in [(1, 128), (128, 1), (129, 64), (64, 129)]] == [True, True, False, False]
    said = failure(torch.bfloat16, 8, 64, 64)
    assert said is not None
    assert said.startswith("Triton's kernels do not run here: ")
    assert "\n" not in said


@pytest.fixture
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.usefixtures("_empty_cache")
def test_places_are_computed_in_64_bits() -> None:
    """Logits, or rows times their distance, may be more than 32 bits count."""
    for of_pairs in (False, True):
        products = re.findall(r"arith\.muli .* : (\S+)", build_loss(37_000, torch.bfloat16, True, 90, of_pairs).ttir)
        assert set(products) == {"i64"}
    for name in KERNELS:
        build = build_attention(name, Options(64, torch.bfloat16, True, True), 90)
        _, *lines = build.ttir.split("attributes {noinline")
        uses = re.findall(r"= (.*)%(?:query|key|result)_stride\b(.*) loc", lines[0])
        assert len(uses) >= 3
        assert all(use == ("arith.extsi ", " : i32 to i64") for use in uses), uses


@pytest.mark.slow
@pytest.mark.usefixtures("_empty_cache")
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_kernels_compile_and_fit_into_shared_memory(capability: int) -> None:
    sizes, either = (32, 64, 128), (False, True)
    variants = [Options(64, torch.float16, True, True)]
    if capability == 100:  # Compiling takes long: the type that most train in, with all that a kernel may have.
        variants += [Options(size, torch.bfloat16, True, True) for size in sizes]
    else:
        variants += [Options(size, torch.bfloat16, *flags) for size in sizes for flags in product(either, either)]
        variants += [
            Options(size, torch.float32, True, *rest) for size in sizes for rest in product(either, ("tf32", "ieee"))
        ]
    for name, options in product(KERNELS, variants):
        assert build_attention(name, options, capability).shared <= SHARED_BYTES[capability]
    for dtype, has_gradient, of_pairs in product((torch.bfloat16, torch.float32), either, either):
        assert build_loss(37_000, dtype, has_gradient, capability, of_pairs).shared <= SHARED_BYTES[capability]
