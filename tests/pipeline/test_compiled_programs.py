"""When the search and attention are compiled, and which programs are loaded."""

import ctypes
import ctypes.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from model.backend import PYTORCH_SEARCH
from model.fast import compiled_attention, compiled_search
from model.packed_attention import PLAIN_ATTENTION
from model.settings import NetworkSettings
from pipeline.runtime.backend_choice import choose_backend, load_compiled_attention, load_compiled_search
from pipeline.runtime.compiled_code import Program, build, find_compiler, load_program
from tests.conftest import run_here

WITHOUT_SEARCH = "translating without the compiled search, which is slower: "
COMPILING = "compiling the square for this processor, once\n"


def load_square(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    if not hasattr(library, "square"):
        raise OSError(f"{path} is no square")
    return library


@pytest.fixture
def square(tmp_path: Path) -> Program[ctypes.CDLL]:
    """A program that is compiled in a moment."""
    sources = tmp_path / "square.cpp", tmp_path / "product.h"
    sources[0].write_text('#include "product.h"\nextern "C" int square(int x) { return product(x, x); }\n')
    sources[1].write_text("inline int product(int x, int y) { return x * y; }\n")
    return Program("square", sources, load_square, lambda library: library.square(-3) == 9)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The user's folder of compiled code, which does not exist yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / "cache/attention-pipeline/compiled"


def programs(cache: Path) -> list[Path]:
    return sorted(cache.glob("*.so"))


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return str(path)


def test_a_program_is_compiled_once_and_again_if_it_is_gone(
    square: Program[ctypes.CDLL], cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load_program(square).square(5) == 25
    assert capsys.readouterr().err == COMPILING
    assert cache.stat().st_mode & 0o777 == 0o700
    [path] = programs(cache)
    assert load_program(square).square(5) == 25
    assert capsys.readouterr().err == ""
    path.unlink()
    left = [cache / f".{name}-compiling-left" for name in ("square", "other")]
    for folder in left:
        folder.mkdir()
        (folder / path.name).touch()
    assert load_program(square).square(5) == 25
    assert capsys.readouterr().err == COMPILING
    assert path.exists()
    assert [folder.exists() for folder in left] == [False, True]  # another program may be compiling now


def test_what_another_user_may_have_written_is_compiled_again(
    square: Program[ctypes.CDLL], cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a link. What is compiled is the user's alone, whatever the umask."""
    before = os.umask(0)
    try:
        load_program(square)
    finally:
        os.umask(before)
    [path] = programs(cache)
    for spoil, said in (
        (lambda: None, ""),
        (lambda: path.chmod(0o664), COMPILING),
        (lambda: path.rename(tmp_path / "x.so") and path.symlink_to(tmp_path / "x.so"), COMPILING),
    ):
        spoil()
        capsys.readouterr()
        assert load_program(square).square(5) == 25
        assert capsys.readouterr().err == said
        assert not path.is_symlink()
        assert path.stat().st_mode & 0o022 == 0
    # Another program is another library.
    square.sources[1].write_text("inline int product(int x, int y) { return 9 - 2 * (x + 3) * (y > -9); }\n")
    other = load_program(square._replace(name="other"))
    assert (other.square(-3), other.square(0)) == (9, 3)


@pytest.mark.parametrize("sources", [one.SOURCES for one in (compiled_search, compiled_attention)])
def test_the_headers_are_among_the_sources(sources: tuple[Path, ...]) -> None:
    included = {name for one in sources for name in re.findall(r'#include "(.*)"', one.read_text())}
    assert included == {one.name for one in sources[1:]}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("no-such-compiler", "CXX names no-such-compiler, which is not installed"),
        ("'", "CXX is no command: No closing quotation"),
        ("exit 1", "ended with 1: no message"),
        ("echo 'search.cpp:1: error: bad' >&2; exit 2", "ended with 2: search.cpp:1: error: bad"),
        ("echo 'ld: no -lx\ncollect2: error: ld ended' >&2; exit 1", "ended with 1: ld: no -lx"),
        ("exit 0", "No such file"),
        (None, "none of g++, clang++, c++ is installed, and CXX names no other compiler"),
    ],
)
def test_a_compiler_that_is_missing_or_fails(
    square: Program[ctypes.CDLL],
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str | None,
    message: str,
) -> None:
    if command is None:
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setattr(shutil, "which", lambda name: None)
    else:
        is_script = command.startswith(("exit", "echo"))
        monkeypatch.setenv("CXX", script(tmp_path / "compiler", command) if is_script else command)
    with pytest.raises(OSError, match=re.escape(message)) as refused:
        load_program(square)
    assert len(str(refused.value).splitlines()) == 1
    assert capsys.readouterr().err in ("", COMPILING)
    assert not programs(cache)


def test_without_a_program_pytorch_computes_and_one_line_says_so(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    settings = NetworkSettings(num_layers=1, d_model=16, d_ff=8, num_heads=1)
    backend = choose_backend(None, None, {"accelerator": "cpu", "precision": "32-true"}, settings)
    assert (backend.attention, backend.search) == (PLAIN_ATTENTION, PYTORCH_SEARCH)
    reason = "CXX names no-such-compiler, which is not installed"
    assert backend.notes == (f"training without the compiled attention, search, which is slower: {reason}",)


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        # What comes after the first sum of a layer's norm is left out.
        ("search", r"s/y\[i\] = (x\[i\] - mean)/y[i] = x[i]/"),
        # The gradient of the keys is added to what was in memory.
        ("attention", "s/std::fill_n(grad_keys_.*//"),
        ("attention", "s/? query + 1 : num_keys_/? num_keys_ : num_keys_/"),
        ("attention", "s/total += difference - difference;/;/"),
    ],
)
def test_a_program_that_computes_something_else_is_not_kept(
    name: str, mistake: str, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    load = {"search": load_compiled_search, "attention": load_compiled_attention}[name]
    [compiler] = find_compiler()
    wrong = script(
        tmp_path / "compiler",
        f"""[ "$1" = --version ] && exec {compiler} --version
for word; do case "$word" in *.cpp) source=$word ;; esac; done
sed '{mistake}' "$source" > {tmp_path}/wrong.cpp
cmp -s "$source" {tmp_path}/wrong.cpp && exit 9
include="-I${{source%/*}}"
for word; do shift; [ "$word" = "$source" ] && word={tmp_path}/wrong.cpp; set -- "$@" "$word"; done
exec {compiler} "$include" "$@" -O0 """,
    )
    monkeypatch.setenv("CXX", wrong)
    with pytest.raises(OSError, match=f"made from {name}.cpp computes other results; try another compiler"):
        load()
    assert not programs(cache)


def test_a_program_leaves_the_arithmetic_of_the_process_as_it_is(square: Program[ctypes.CDLL], tmp_path: Path) -> None:
    """In a process of its own, since a failure would change this one."""
    made = tmp_path / "square.so"
    build([*find_compiler(), "-ffast-math"], square.sources[0], made)
    code = f"import ctypes, sys; ctypes.CDLL({str(made)!r}); assert sys.float_info.min / 2 > 0, 'subnormals are 0'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("load", "name"),
    [
        (compiled_search.load_library, "search"),
        (compiled_attention.CompiledAttention, "attention"),
    ],
)
def test_another_library_is_refused(load: Callable[[Path], object], name: str) -> None:
    with pytest.raises(OSError, match=f"is no compiled {name}"):
        load(Path(ctypes.util.find_library("m") or "libm.so.6"))


def test_threads_of_a_process_compile_once(
    square: Program[ctypes.CDLL], cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ThreadPoolExecutor(3) as threads:
        assert [one.square(2) for one in threads.map(load_program, [square] * 3)] == [4, 4, 4]
    assert capsys.readouterr().err == COMPILING


def test_translations_without_a_compiler_are_the_same(
    trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").write_text("the dog sees a cat\nthe old man\n")
    command = ["translate", trained_run, "--source", tmp_path / "text"]
    compiled, said = run_here(*command)
    monkeypatch.setenv("CXX", "no-such-compiler")
    operators, warned = run_here(*command)
    assert compiled == operators
    lines = [f"{WITHOUT_SEARCH}CXX names no-such-compiler, which is not installed"]
    assert [[line for line in text.splitlines() if WITHOUT_SEARCH in line] for text in (said, warned)] == [[], lines]
