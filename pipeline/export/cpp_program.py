"""`cpp/`: the search on a CPU as a C++ program without a library, and its weights."""

import ctypes
import tempfile
from pathlib import Path

from data_module.errors import InputError
from data_module.files import atomic_file
from model.fast.compiled_search import SOURCES, load_library, unsupported, write_weights
from model.transformer import Transformer
from pipeline.inference.translator import LONGEST
from pipeline.runtime.compiled_code import build, find_compiler

PROGRAM = SOURCES[0].name
WEIGHTS = "weights.bin"


def num_positions(max_positions: int, max_extra_tokens: int) -> int:
    """Return how many position encodings the weights have: all learned ones, or enough for the longest answers.

    Args:
        max_positions: number of learned positions; 0 for sinusoidal ones.
        max_extra_tokens: how many tokens an answer may have beyond its source's.
    """
    return max_positions or LONGEST + max_extra_tokens


def require_compiled(network: Transformer) -> None:
    """Raise InputError if the program lacks a part of the network, or if there is no compiler to compare it with."""
    if lacking := unsupported(network.settings):
        raise InputError(f"the C++ program lacks {lacking}, which this network has; export other formats")
    try:
        find_compiler()
    except OSError as error:
        raise InputError(f"--format cpp is compiled to compare it with the checkpoint: {error}") from None


def write_cpp(network: Transformer, num_positions: int, folder: Path) -> None:
    """Write `search.cpp` and `weights.bin`. Sinusoidal positions are written up to `num_positions`, learned ones all.

    Raises:
        InputError: see `require_compiled`.
    """
    require_compiled(network)
    folder.mkdir()
    (folder / PROGRAM).write_text(_single_file(), encoding="utf-8")
    with atomic_file(folder / WEIGHTS) as file:
        write_weights(network, num_positions, file)


def _single_file() -> str:
    """Return the program with its header in place of the line that includes it."""
    source, header = (path.read_text(encoding="utf-8") for path in SOURCES)
    include = f'#include "{SOURCES[1].name}"\n'
    assert source.count(include) == 1
    return source.replace(include, header.replace("#pragma once\n\n", ""))


def compile_cpp(folder: Path) -> ctypes.CDLL:
    """Compile the program in a folder and load it. The caller has just written it: it runs with this process's rights.

    Raises:
        InputError: it does not compile, or cannot be loaded.
    """
    with tempfile.TemporaryDirectory() as temporary:
        try:
            made = Path(temporary, "search.so")
            build(find_compiler(), folder / PROGRAM, made)
            return load_library(made)
        except OSError as error:
            raise InputError(f"--format cpp cannot be compared with the checkpoint: {error}") from None
