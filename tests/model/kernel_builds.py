"""Compiles the Triton kernels for GPUs that are not here, and reads from the code what they use of a multiprocessor."""

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from model.fast import triton_attention, triton_loss
from model.loss import _projection

KERNELS = {
    "forward": triton_attention._forward,
    "backward, queries": triton_attention._backward_queries,
    "backward, keys": triton_attention._backward_keys,
}
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Build(NamedTuple):
    registers: int
    """Of a thread."""
    spilled: int
    """Bytes of a thread's registers that are in memory instead."""
    shared: int
    """Bytes of shared memory of a program."""
    accesses: Counter[int]
    """Numbers of instructions that read or write global memory, by bits of a thread."""
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
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        command = [_CUOBJDUMP, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", said)
    assert found is not None, said
    registers, *spilled = map(int, found.groups())
    return Build(registers, sum(spilled), built.metadata.shared, _accesses(built.asm["ptx"]), built.asm["ttir"])


def _accesses(ptx: str) -> Counter[int]:
    direct = re.findall(r"\b(?:ld|st)\.global\S*?(?:\.v(\d))?\.[bf](\d+)\s", ptx)
    # Copies to shared memory, whose size in bytes is the third operand.
    copied = re.findall(r"\bcp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (0x\w+|\d+)", ptx)
    return Counter([int(count or 1) * int(bits) for count, bits in direct] + [8 * int(size, 0) for size in copied])
