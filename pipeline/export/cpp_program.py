"""`cpp/`: the search on a CPU as a C++ program without a library, and its weights."""

import ctypes
import tempfile
from pathlib import Path

from data_module.errors import InputError
from model.fast.compiled_search import SOURCES, load_library, unsupported, write_weights
from model.transformer import Transformer
from pipeline.export.support import refuse
from pipeline.inference.translator import LONGEST
from pipeline.runtime.compiled_code import build, find_compiler

WEIGHTS = "weights.bin"


def require_compiled(network: Transformer) -> None:
    """Raise InputError if the program lacks a part of the network, or if no compiler is found to test it with."""
    lacking = unsupported(network.settings)
    refuse("the C++ program", [lacking] if lacking else [])
    try:
        find_compiler()
    except OSError as error:
        raise InputError(f"--format cpp is compiled to compare it with the checkpoint: {error}") from None


def write_cpp(network: Transformer, max_extra_tokens: int, folder: Path) -> None:
    """Write `search.cpp` and `weights.bin`, which has all learned position encodings, or sinusoids for all answers.

    The network is one for which `require_compiled` raises nothing.
    """
    folder.mkdir()
    source, header = (path.read_text(encoding="utf-8") for path in SOURCES)
    include = f'#include "{SOURCES[1].name}"\n'
    assert source.count(include) == 1
    program = source.replace(include, header.replace("#pragma once\n\n", ""))
    (folder / SOURCES[0].name).write_text(program, encoding="utf-8")
    with (folder / WEIGHTS).open("wb") as file:
        write_weights(network, LONGEST + max_extra_tokens, file)


def compile_cpp(folder: Path) -> ctypes.CDLL:
    """Compile the program in a folder and load it. It runs with this process's rights: write it just before the call.

    Raises InputError if the program does not compile, or cannot be loaded.
    """
    with tempfile.TemporaryDirectory() as temporary:
        try:
            made = Path(temporary, "search.so")
            build(find_compiler(), folder / SOURCES[0].name, made)
            return load_library(made)
        except OSError as error:
            raise InputError(f"--format cpp cannot be compared with the checkpoint: {error}") from None
