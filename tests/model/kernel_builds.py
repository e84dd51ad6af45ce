"""Compiles the Triton kernels for GPUs that are not here, and reads what they use of a multiprocessor.

python -m tests.model.kernel_builds        rewrites the table in docs/performance.md, in about three minutes
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from model.gpu import loss_kernel, segment_kernels
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "performance.md"
GPUS = {80: "A100 (sm_80)", 90: "H100, H200 (sm_90)", 100: "B200 (sm_100)"}
"""Compute capability -> name."""
KERNELS = {
    "forward": segment_kernels._forward,
    "backward, queries": segment_kernels._backward_queries,
    "backward, keys": segment_kernels._backward_keys,
}
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
SIZES = (32, 64, 128)
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_MARKS = re.compile(r"(<!-- kernels -->\n).*?(<!-- end of kernels -->)", re.DOTALL)


class Usage(NamedTuple):
    """What a compiled kernel uses."""

    registers: int
    """A thread's."""
    spilled: int
    """Bytes of a thread's registers that are in memory instead."""
    shared: int
    """Bytes of shared memory of a program."""


class Options(NamedTuple):
    """A variant of the attention kernels."""

    size: int
    """d_k and d_v."""
    dtype: torch.dtype
    is_causal: bool = True
    has_dropout: bool = False
    precision: str = "tf32"
    """Of products in float32."""


def sixteen_bits() -> list[Options]:
    """Return all variants in bfloat16, and those of the paper's heads in float16."""
    kinds = [(size, torch.bfloat16) for size in SIZES] + [(64, torch.float16)]
    return [Options(*kind, causal, drop) for kind in kinds for causal in (True, False) for drop in (False, True)]


def float32() -> list[Options]:
    """Return variants in float32, with products in TF32 and in full precision."""
    return [
        Options(size, torch.float32, True, drop, precision)
        for size in SIZES
        for drop in (False, True)
        for precision in ("tf32", "ieee")
    ]


@cache
def attention_usage(name: str, options: Options, capability: int) -> Usage:
    """Compile a kernel of `KERNELS` for a compute capability."""
    kernel, pointer = KERNELS[name], "*" + TYPES[options.dtype]
    types = dict.fromkeys(kernel.arg_names, pointer)
    types |= dict.fromkeys(("log_sums", "products"), "*fp32")
    types |= dict.fromkeys(("query_ids", "key_ids", "key_offsets", "query_offsets"), "*i32")
    sizes = ("num_queries", "num_keys", "num_segments", "num_heads")
    types |= dict.fromkeys((*sizes, "query_stride", "key_stride", "result_stride", "key_column", "value_column"), "i32")
    types |= {"dropout": "*i64"}
    tiles = segment_kernels.tiles(kernel, options.size, options.size, options.dtype)
    launch = {key: tiles.pop(key) for key in ("num_warps", "num_stages")}
    block = segment_kernels._block(options.size)
    constants = {
        **{"D_K": options.size, "D_V": options.size, "BLOCK_K": block, "BLOCK_V": block},
        **{"IS_CAUSAL": options.is_causal, "HAS_DROPOUT": options.has_dropout},
        **{"UPCAST": False, "PRECISION": options.precision, **tiles},
        "SCALE": 0.125,
    }
    return _usage(kernel, types, constants, launch, capability)


@cache
def loss_usage(dtype: torch.dtype, has_gradient: bool, capability: int, of_pairs: bool = False) -> Usage:
    """Compile the loss kernel, or that of R-Drop, for a compute capability."""
    kernel = loss_kernel._row_pair if of_pairs else loss_kernel._row
    types = dict.fromkeys(kernel.arg_names, "*fp32")
    types |= {"logits": "*" + TYPES[dtype], "targets": "*i64", "vocabulary_size": "i32"}
    types |= {"epsilon": "fp32", "alpha": "fp32"}
    constants = {"HAS_GRADIENT": has_gradient, "BLOCK": loss_kernel._BLOCK // (2 if of_pairs else 1)}
    return _usage(kernel, types, constants, {"num_warps": 8}, capability)


def _usage(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], launch: dict[str, int], capability: int
) -> Usage:
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    # What a launch knows of tensors, and of widths that are multiples of 16.
    aligned = [name for name in names if signature[name].startswith("*") or name.endswith(("stride", "column"))]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=values, attrs=attributes)
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        command = [_CUOBJDUMP, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", said)
    assert found is not None, said
    registers, stack, local = map(int, found.groups())
    return Usage(registers, stack + local, built.metadata.shared)


def table() -> str:
    """Return the usage of each kernel as a table: registers, with dropout in brackets, and kB of shared memory."""
    rows = [
        f"Triton {triton.__version__}, causal attention; float32 with products in TF32:",
        "",
        "| kernel | type, head | " + " | ".join(GPUS.values()) + " |",
        "| --- | --- |" + " --- |" * len(GPUS),
    ]
    for dtype in (torch.bfloat16, torch.float32):
        word = str(dtype).removeprefix("torch.")
        for size in SIZES:
            for name in KERNELS:
                plain, dropped = (Options(size, dtype, has_dropout=drop) for drop in (False, True))
                usages = [
                    [attention_usage(name, options, capability) for options in (plain, dropped)] for capability in GPUS
                ]
                rows.append(f"| {name} | {word}, {size} | {' | '.join(_cells(usages))} |")
    for dtype in (torch.bfloat16, torch.float32):
        usages = [[loss_usage(dtype, True, capability)] for capability in GPUS]
        rows.append(f"| loss | {str(dtype).removeprefix('torch.')} | {' | '.join(_cells(usages))} |")
    return "\n".join(rows)


def _cells(usages: list[list[Usage]]) -> Iterator[str]:
    for plain, *dropped in usages:
        registers = "".join([str(plain.registers), *(f" ({one.registers})" for one in dropped)])
        shared = max(one.shared for one in (plain, *dropped))
        spilled = "".join(f", {one.spilled} B spilled" for one in (plain, *dropped) if one.spilled)
        yield f"{registers}; {shared / 1024:.0f} kB{spilled}"


def updated(page: str) -> str:
    """Return the page with its table written anew."""
    return _MARKS.sub(lambda match: f"{match[1]}\n{table()}\n\n{match[2]}", page)


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
