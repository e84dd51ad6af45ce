"""Compiles the search for this processor, once, and keeps the program in the user's own cache.

The program is code that runs with the user's rights. It is made from the source that comes with the project, it is
loaded from the user's private folder only, and only if it is the program that was put there.
"""

import ctypes
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from pipeline.runtime.private_folder import compiled_code_folder

_COMPILERS = ("g++", "clang++", "c++")
_COMPILING = ".compiling-"
"""How the name of a folder begins in which a program is made."""
_SECONDS = 300
"""How long the compiler may take; it takes a few seconds."""


def load_compiled_search() -> ctypes.CDLL | None:
    """Return the compiled search, and compile it first if that has not been done.

    Where that is not possible, say why in one line and return None: PyTorch's operators find the same translations.
    """
    try:
        compiler = find_compiler()
        folder = compiled_code_folder()
        path = folder / f"search-{_key(compiler)}.so"
        # Several processes of one command begin at the same time.
        with Path(folder, "search.lock").open("w") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)
            if not _is_whole(path):
                _compile(compiler, path)
        from model.compiled_search import load_library

        return load_library(path)
    except OSError as error:
        print(f"translating without the compiled search, which is slower: {error}", file=sys.stderr)
        return None


def find_compiler() -> list[str]:
    """Return the command of a C++ compiler: CXX, or the first that is installed.

    Raises:
        OSError: there is none.
    """
    try:
        given = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise OSError(f"CXX is no command: {error}") from None
    candidates = [given] if given else [[name] for name in _COMPILERS]
    for command in candidates:
        if found := shutil.which(command[0]):
            return [found, *command[1:]]
    if given:
        raise OSError(f"CXX names {given[0]}, which is not installed")
    raise OSError("there is no C++ compiler; install g++ or clang++")


def _key(compiler: list[str]) -> str:
    """Return a hash of all that the program depends on: source, compiler with its arguments, processor."""
    from model.compiled_search import FLAGS, SOURCE

    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise OSError(f"{compiler[0]} --version takes more than {_SECONDS} seconds") from None
    parts = (SOURCE.read_bytes(), repr((compiler, FLAGS, _processor())).encode(), version.stdout)
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:32]


def _processor() -> str:
    """Return the name of the processor and the instructions that it has."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    named = [
        line for line in lines if line.partition(":")[0].strip() in ("vendor_id", "model name", "flags", "Features")
    ]
    return "\n".join([platform.machine(), platform.processor(), *named])


def _checksum_path(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _is_whole(path: Path) -> bool:
    """Return whether a program is there and has the checksum that was written with it."""
    try:
        expected = _checksum_path(path).read_text(encoding="ascii")
        return hashlib.sha256(path.read_bytes()).hexdigest() == expected
    except (OSError, ValueError):
        return False


def build(compiler: list[str], source: Path, made: Path) -> None:
    """Compile a search to `made`.

    Raises:
        OSError: the compiler fails.
    """
    from model.compiled_search import FLAGS

    command = [*compiler, *FLAGS, str(source), "-o", str(made)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise OSError(f"{compiler[0]} takes more than {_SECONDS} seconds") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise OSError(f"{compiler[0]} ended with {done.returncode}: {lines[0] if lines else 'no message'}")


def _compile(compiler: list[str], path: Path) -> None:
    """Compile the search to `path`, and write its checksum.

    Raises:
        OSError: the compiler fails, or the program finds other translations than PyTorch's operators.
    """
    from model.compiled_search import SOURCE, load_library

    print("compiling the search for this processor, once", file=sys.stderr)
    for left in path.parent.glob(f"{_COMPILING}*"):  # by a killed process; no other one compiles now
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=_COMPILING) as folder:
        made = Path(folder, path.name)
        build(compiler, SOURCE, made)
        from pipeline.inference.compiled_check import agrees

        if not agrees(load_library(made)):
            raise OSError(f"what {compiler[0]} made from {SOURCE.name} finds other translations; try another compiler")
        checksum = hashlib.sha256(made.read_bytes()).hexdigest()
        # The program first: a checksum without its program, or with another one, makes it anew.
        made.replace(path)
        made.write_text(checksum, encoding="ascii")
        made.replace(_checksum_path(path))
