"""When the search and the loss are compiled, and which programs are loaded."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from model.cpu import compiled_loss
from pipeline.inference.compiled_search import load_compiled_search
from pipeline.runtime.compiled_code import find_compiler
from pipeline.training.compiled_loss import load_compiled_loss
from tests.conftest import ROOT, pipeline


class Program(NamedTuple):
    load: Callable[[], Any]
    name: str
    without: str

    @property
    def compiling(self) -> str:
        return f"compiling the {self.name} for this processor, once\n"


SEARCH = Program(
    load_compiled_search,
    "search",
    "translating without the compiled search, which is slower: ",
)
LOSS = Program(
    load_compiled_loss,
    "loss",
    "training without the compiled loss, which is slower: ",
)


@pytest.fixture(params=[SEARCH, LOSS], ids=["search", "loss"])
def program(request: pytest.FixtureRequest) -> Program:
    return request.param


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


def test_a_program_is_compiled_once_and_again_if_it_is_not_whole(
    program: Program, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.load() is not None
    assert capsys.readouterr().err == program.compiling
    assert cache.stat().st_mode & 0o777 == 0o700
    [path] = programs(cache)
    contents = path.read_bytes()
    assert program.load() is not None
    assert capsys.readouterr().err == ""
    # A new file, since this process has mapped the old one.
    path.unlink()
    path.write_bytes(contents[:-1])
    left = [cache / f".{name}-compiling-left" for name in (program.name, "other")]
    for folder in left:
        folder.mkdir()
        (folder / path.name).touch()
    assert program.load() is not None
    assert capsys.readouterr().err == program.compiling
    assert len(path.read_bytes()) == len(contents)
    assert [folder.exists() for folder in left] == [False, True]  # another program may be compiling now


def test_each_program_has_a_file_of_its_own(cache: Path) -> None:
    for number, program in enumerate((SEARCH, LOSS), 1):
        assert program.load() is not None
        assert len(programs(cache)) == number


def test_another_compiler_or_header_makes_another_program(
    program: Program, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [compiler] = find_compiler()
    for number in (1, 2):
        monkeypatch.setenv("CXX", f"{compiler} -O1 -DNUMBER={number}")
        assert program.load() is not None
        assert capsys.readouterr().err == program.compiling
        assert len(programs(cache)) == number
    header = tmp_path / "vectors.h"
    header.write_text(compiled_loss.SOURCES[1].read_text() + "// changed\n")
    for module in ("pipeline.inference.compiled_search", "pipeline.training.compiled_loss"):
        monkeypatch.setattr(f"{module}.SOURCES", (compiled_loss.SOURCES[0].with_name(f"{program.name}.cpp"), header))
    assert program.load() is not None
    assert len(programs(cache)) == 3


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("no-such-compiler", "CXX names no-such-compiler, which is not installed"),
        ("'", "CXX is no command: No closing quotation"),
        ("exit 1", "ended with 1: no message"),
        ("echo 'search.cpp:1: error: bad' >&2; exit 2", "ended with 2: search.cpp:1: error: bad"),
        ("echo 'ld: no -lx\ncollect2: error: ld ended' >&2; exit 1", "ended with 1: ld: no -lx"),
        ("exit 0", "No such file"),
    ],
)
def test_a_compiler_that_is_missing_or_fails(
    program: Program,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    message: str,
) -> None:
    is_script = command.startswith(("exit", "echo"))
    monkeypatch.setenv("CXX", script(tmp_path / "compiler", command) if is_script else command)
    assert program.load() is None
    lines = capsys.readouterr().err.removeprefix(program.compiling).splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(program.without)
    assert message in lines[0]
    assert not programs(cache)


def test_no_compiler(
    program: Program, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert program.load() is None
    assert capsys.readouterr().err == f"{program.without}there is no C++ compiler; install g++ or clang++\n"


@pytest.mark.parametrize(
    ("program", "mistake"),
    [
        # What comes after the first sum of a layer's norm is left out.
        (SEARCH, r"s/y\[i\] = (x\[i\] - mean)/y[i] = x[i]/"),
        (LOSS, r"s/exponentials\[target\] -= (1.0f - request.epsilon)/exponentials[target] -= 1.0f/"),
        # A logit that is not finite is not seen, so that the step would not be skipped.
        (LOSS, "s/zero += x - x;/;/"),
    ],
)
def test_a_program_that_computes_something_else_is_not_kept(
    program: Program,
    mistake: str,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    [compiler] = find_compiler()
    wrong = script(
        tmp_path / "compiler",
        f"""[ "$1" = --version ] && exec {compiler} --version
for word; do case "$word" in *.cpp) source=$word ;; esac; done
sed '{mistake}' "$source" > {tmp_path}/wrong.cpp
cmp -s "$source" {tmp_path}/wrong.cpp && exit 9
include="-I${{source%/*}}"
for word; do shift; [ "$word" = "$source" ] && word={tmp_path}/wrong.cpp; set -- "$@" "$word"; done
exec {compiler} "$include" "$@" """,
    )
    monkeypatch.setenv("CXX", wrong)
    assert program.load() is None
    message = f"made from {program.name}.cpp computes other results; try another compiler"
    assert message in capsys.readouterr().err
    assert not programs(cache)


def test_a_program_leaves_the_arithmetic_of_the_process_as_it_is(program: Program, cache: Path, tmp_path: Path) -> None:
    """In a process of its own, since a failure would change this one."""
    code = (
        "from tests.pipeline.test_compiled_programs import LOSS, SEARCH\n"
        f"assert {program.name.upper()}.load() is not None\n"
        "import sys\n"
        "assert sys.float_info.min / 2 > 0, 'subnormal numbers are 0'\n"
    )
    environment = {**os.environ, "CXX": f"{find_compiler()[0]} -ffast-math"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_threads_of_a_process_compile_once(program: Program, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ThreadPoolExecutor(3) as threads:
        assert all(one is not None for one in threads.map(lambda _: program.load(), range(3)))
    assert capsys.readouterr().err == program.compiling


def test_a_folder_that_others_may_write_is_not_used(
    program: Program, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o770)
    assert program.load() is not None
    assert f"instead of {cache}: other users can write to it" in capsys.readouterr().err
    assert not programs(cache)


def test_translations_without_a_compiler_are_the_same(trained_run: Path) -> None:
    text = "the dog sees a cat\nthe old man\n"
    compiled = pipeline("translate", trained_run, text=text)
    operators = pipeline("translate", trained_run, text=text, environment={"CXX": "no-such-compiler"})
    assert compiled.returncode == operators.returncode == 0
    assert compiled.stdout == operators.stdout
    assert SEARCH.without in operators.stderr.decode()
    assert SEARCH.without not in compiled.stderr.decode()
