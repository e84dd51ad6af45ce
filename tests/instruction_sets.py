"""Run the tests whose results depend on rounding with the instructions of this processor, and with fewer.

    python -m tests.instruction_sets                  every set that the processor has
    python -m tests.instruction_sets least            the smallest one
    python -m tests.instruction_sets avx2 -- -k beam  arguments of pytest after --

PyTorch, oneDNN and MKL choose their kernels by environment variables, and a compiler in CXX makes the C++ programs for
the set. MKL obeys its variable on Intel's processors only. The last line is JSON. The exit code is that of the first
set whose tests failed.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

TESTS = (
    "tests/model",
    "tests/export",
    "tests/integration/test_golden_curves.py",
    *(f"tests/pipeline/test_{name}.py" for name in ("compiled_programs", "cpp_program", "parity", "translator")),
    *(f"tests/pipeline/test_{name}_model.py" for name in ("ctranslate2", "huggingface", "onnx")),
)


class InstructionSet(NamedTuple):
    """What each library calls a set of instructions."""

    needs: str
    """The flag of a processor that has the set."""
    aten: str
    onednn: str
    mkl: str
    march: str


SETS = {
    "least": InstructionSet("sse4_2", "default", "SSE41", "SSE4_2", "x86-64"),
    "avx2": InstructionSet("avx2", "avx2", "AVX2", "AVX2", "x86-64-v3"),
    "avx512": InstructionSet("avx512bw", "avx512", "AVX512_CORE", "AVX512", "x86-64-v4"),
}


def processor_flags() -> set[str]:
    """Return the instruction sets that Linux names; none on processors other than x86-64."""
    if platform.machine() != "x86_64":
        return set()
    [line, *_] = [one for one in Path("/proc/cpuinfo").read_text().splitlines() if one.startswith("flags")]
    return set(line.split())


def environment(chosen: InstructionSet | None, folder: Path) -> dict[str, str]:
    """Return the variables that restrict libraries and compiler to a set; None restricts nothing."""
    if chosen is None:
        return {}
    compiler = folder / "g++"
    compiler.write_text(f'#!/bin/sh\nexec {os.environ.get("CXX", "g++")} "$@" -march={chosen.march}\n')
    compiler.chmod(0o700)
    return {
        "ATEN_CPU_CAPABILITY": chosen.aten,
        "ONEDNN_MAX_CPU_ISA": chosen.onednn,
        "MKL_ENABLE_INSTRUCTIONS": chosen.mkl,
        "CXX": str(compiler),
        "XDG_CACHE_HOME": str(folder),
    }


def run(name: str, arguments: list[str]) -> int:
    print(f"\n{name}: {SETS.get(name, 'all that the processor has')}", flush=True)
    with tempfile.TemporaryDirectory(prefix=f"{name}-") as folder:
        variables = {"OMP_NUM_THREADS": "1", **environment(SETS.get(name), Path(folder))}
        command = [sys.executable, "-m", "pytest", *TESTS, "-n", "2", "-m", "not slow", *arguments]
        return subprocess.run(command, env={**os.environ, **variables}, check=False).returncode


def main(words: list[str]) -> int:
    """Run the tests with the sets named before `--`, or with all that the processor has."""
    place = words.index("--") if "--" in words else len(words)
    given, arguments = words[:place], words[place + 1 :]
    flags = processor_flags()
    available = [name for name, one in SETS.items() if one.needs in flags]
    names = given or ["native", *available]
    if unknown := [name for name in names if name not in ("native", *available)]:
        print(f"error: {unknown[0]} is not one of native, {', '.join(available)}", file=sys.stderr)
        return 2
    codes = {name: run(name, arguments) for name in names}
    print(json.dumps(codes))
    return next((code for code in codes.values() if code), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
