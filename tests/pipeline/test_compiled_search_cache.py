"""When the search is compiled, and which programs are loaded."""

import shutil
import tempfile
from pathlib import Path

import pytest

from pipeline.inference.compiled_code import find_compiler, load_compiled_search
from tests.conftest import pipeline

COMPILING = "compiling the search for this processor, once\n"
WITHOUT = "translating without the compiled search, which is slower: "


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


def test_the_search_is_compiled_once_and_again_if_the_program_is_not_whole(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load_compiled_search() is not None
    assert capsys.readouterr().err == COMPILING
    assert cache.stat().st_mode & 0o777 == 0o700
    [program] = programs(cache)
    contents = program.read_bytes()
    assert load_compiled_search() is not None
    assert capsys.readouterr().err == ""
    # A new file, since this process has mapped the old one.
    program.unlink()
    program.write_bytes(contents[:-1])
    left = cache / ".compiling-left"
    left.mkdir()
    (left / program.name).touch()
    assert load_compiled_search() is not None
    assert capsys.readouterr().err == COMPILING
    assert len(program.read_bytes()) == len(contents)
    assert not left.exists()


def test_another_compiler_makes_another_program(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [compiler] = find_compiler()
    for number in (1, 2):
        monkeypatch.setenv("CXX", f"{compiler} -O1 -DNUMBER={number}")
        assert load_compiled_search() is not None
        assert capsys.readouterr().err == COMPILING
        assert len(programs(cache)) == number


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("no-such-compiler", "CXX names no-such-compiler, which is not installed"),
        ("'", "CXX is no command: No closing quotation"),
        ("exit 1", "ended with 1: no message"),
        ("echo 'search.cpp:1: error: bad' >&2; exit 2", "ended with 2: search.cpp:1: error: bad"),
        ("exit 0", "No such file"),
    ],
)
def test_a_compiler_that_is_missing_or_fails(
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    message: str,
) -> None:
    is_script = command.startswith(("exit", "echo"))
    monkeypatch.setenv("CXX", script(tmp_path / "compiler", command) if is_script else command)
    assert load_compiled_search() is None
    lines = capsys.readouterr().err.removeprefix(COMPILING).splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(WITHOUT)
    assert message in lines[0]
    assert not programs(cache)


def test_no_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert load_compiled_search() is None
    assert capsys.readouterr().err == f"{WITHOUT}there is no C++ compiler; install g++ or clang++\n"


def test_a_program_that_finds_other_translations_is_not_kept(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A compiler that leaves out what is after the first sum of a layer's norm."""
    [compiler] = find_compiler()
    wrong = script(
        tmp_path / "compiler",
        f"""[ "$1" = --version ] && exec {compiler} --version
for word; do case "$word" in *.cpp) source=$word ;; esac; done
sed 's/y\\[i\\] = (x\\[i\\] - mean)/y[i] = x[i]/' "$source" > {tmp_path}/wrong.cpp
for word; do shift; [ "$word" = "$source" ] && word={tmp_path}/wrong.cpp; set -- "$@" "$word"; done
exec {compiler} "$@" """,
    )
    monkeypatch.setenv("CXX", wrong)
    assert load_compiled_search() is None
    assert "made from search.cpp finds other translations; try another compiler" in capsys.readouterr().err
    assert not programs(cache)


def test_a_folder_that_others_may_write_is_not_used(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o770)
    assert load_compiled_search() is not None
    assert f"instead of {cache}: other users can write to it" in capsys.readouterr().err
    assert not programs(cache)


def test_translations_without_a_compiler_are_the_same(trained_run: Path) -> None:
    text = "the dog sees a cat\nthe old man\n"
    compiled = pipeline("translate", trained_run, text=text)
    operators = pipeline("translate", trained_run, text=text, environment={"CXX": "no-such-compiler"})
    assert compiled.returncode == operators.returncode == 0
    assert compiled.stdout == operators.stdout
    assert WITHOUT in operators.stderr.decode()
    assert WITHOUT not in compiled.stderr.decode()
