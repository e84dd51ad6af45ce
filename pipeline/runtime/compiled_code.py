"""Compiles the project's C++ programs for this processor, once, and keeps all compiled code in the user's own cache.

A program runs with the user's rights. It is compiled from source that comes with the project, and loaded only from the
user's private folder.
"""

import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from data_module.errors import InputError
from data_module.system.files import FileLock, atomic_file, private_folder
from data_module.system.worker_processes import signals_blocked
from pipeline.runtime.console import report, say
from pipeline.runtime.torch_private import default_compiler_cache, start_compile_workers

Loaded = TypeVar("Loaded")

FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-pthread", "-fno-fast-math")
"""Arguments of the compiler, before `SOURCE -o LIBRARY`.

With `-ffast-math` in CXX, loading a program would make the whole process round subnormal numbers to 0."""
_COMPILING = "-compiling-"
"""Part of the name of a folder in which a program is compiled."""
_SECONDS = 300
"""How long the compiler may take. Usually it takes a few seconds."""


class Program(NamedTuple, Generic[Loaded]):
    """A program of the project."""

    name: str
    """One word, for messages and files."""
    sources: tuple[Path, ...]
    """The source, then the headers beside it."""
    load: Callable[[Path], Loaded]
    """Loads the compiled program; raises OSError if the file is no such program."""
    agrees: Callable[[Loaded], bool]
    """Returns whether the program computes the same as PyTorch's operators."""


def load_program(program: Program[Loaded]) -> Loaded:
    """Load a program; compile it first if necessary.

    Raises OSError if there is no compiler, it fails, or the program does not agree with PyTorch's operators.
    """
    compiler = find_compiler()
    folder = compiled_code_folder()
    path = folder / f"{program.name}-{_key(compiler, program.sources)}.so"
    # Several processes of a command, or threads of a process, may load the program at the same time.
    with FileLock(folder / f"{program.name}.lock") as lock:
        lock.take(wait=True)
        if not _is_own(path):
            _compile(compiler, program, path)
    return program.load(path)


def _is_own(path: Path) -> bool:
    """Return whether a compiled program exists that no other user may have written when the folder was less private."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022


def find_compiler(variable: str = "CXX", names: Sequence[str] = ("g++", "clang++", "c++")) -> list[str]:
    """Return the command of a compiler: from an environment variable, or the first of `names` that is installed.

    Raises OSError if there is none.
    """
    try:
        given = shlex.split(os.environ.get(variable, ""))
    except ValueError as error:
        raise OSError(f"{variable} is no command: {error}") from None
    for command in [given] if given else [[name] for name in names]:
        if path := shutil.which(command[0]):
            return [path, *command[1:]]
    if given:
        raise OSError(f"{variable} names {given[0]}, which is not installed")
    raise OSError(f"none of {', '.join(names)} is installed, and {variable} names no other compiler")


def _key(compiler: list[str], sources: tuple[Path, ...]) -> str:
    """Return a hash of all that the program depends on: sources, compiler with its arguments, processor."""
    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise OSError(f"{compiler[0]} --version takes more than {_SECONDS} seconds") from None
    parts = (
        *(source.read_bytes() for source in sources),
        repr((compiler, FLAGS, _processor())).encode(),
        version.stdout,
    )
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:32]


def _processor() -> str:
    """Return the name of the processor and its instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    named = [
        line for line in lines if line.partition(":")[0].strip() in ("vendor_id", "model name", "flags", "Features")
    ]
    return "\n".join([platform.machine(), platform.processor(), *named])


def build(compiler: list[str], source: Path, made: Path) -> None:
    """Compile a program to `made`; raise OSError if the compiler fails."""
    command = [*compiler, *FLAGS, str(source), "-o", str(made)]
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise OSError(f"{compiler[0]} takes more than {_SECONDS} seconds") from None
    if done.returncode:
        # Skip the message of collect2, which follows the linker's own.
        lines = [line for line in done.stderr.splitlines() if not line.startswith("collect2: ")]
        errors = [line for line in lines if "error" in line] or lines
        raise OSError(f"{compiler[0]} ended with {done.returncode}: {errors[0] if errors else 'no message'}")


def _compile(compiler: list[str], program: Program[Loaded], path: Path) -> None:
    """Compile a program to `path`; raise OSError as `load_program` does."""
    report(f"compiling the {program.name} for this processor, once")
    prefix = f".{program.name}{_COMPILING}"
    for left in path.parent.glob(f"{prefix}*"):  # Left by killed processes; no other process compiles now.
        shutil.rmtree(left, ignore_errors=True)  # A folder that stays does no harm.
    source = program.sources[0]
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=prefix) as folder:
        made = Path(folder, path.name)
        build(compiler, source, made)
        if not program.agrees(program.load(made)):
            raise OSError(f"what {compiler[0]} made from {source.name} computes other results; try another compiler")
        with atomic_file(path) as file:
            os.fchmod(file.fileno(), 0o700)
            file.write(made.read_bytes())


def compiled_code_folder() -> Path:
    """Return `attention-pipeline/compiled` in XDG_CACHE_HOME, or else in ~/.cache, and create it if necessary.

    If other users could put code into it or it cannot be written, a temporary folder of this machine replaces it, with
    a message.

    Raises OSError if the temporary folder is not safe either.
    """
    kept = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "attention-pipeline", "compiled")
    try:
        return private_folder(kept)
    except (OSError, RuntimeError) as error:
        temporary = Path(tempfile.gettempdir(), f"attention-pipeline-{os.geteuid()}")
        try:
            folder = private_folder(temporary)
        except OSError as other:
            raise OSError(
                f"compiled code cannot be kept in {kept} ({_reason(error)}), nor in {temporary} ({_reason(other)})"
            ) from None
        _say_once(f"compiled code is kept in {temporary} instead of {kept}: {_reason(error)}")
        return folder


_say_once = cache(say)
"""Prints a line; several programs have the same folder."""


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def missing_compiler() -> str | None:
    """Return what compilation for a GPU lacks, as a predicate: "needs ..."; None if nothing is missing."""
    try:
        find_compiler("CC", ("gcc", "clang"))  # for the code that launches kernels
    except OSError as error:
        return f"needs a compiler: {error}"
    header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")  # Where Triton looks for it, too.
    if not header.exists():
        return f"needs Python's C headers, python3-dev or python3-devel, and {header} is missing"
    return None


def keep_compiled_code() -> None:
    """Set the compilers' cache folders to ones that outlive the job, unless the user has set them.

    See `compiled_code_folder`. Call this before anything is compiled.

    Raises InputError if there is no safe folder.
    """
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", "") not in ("", default_compiler_cache()):
        return
    try:
        folder = compiled_code_folder()
    except OSError as error:
        raise InputError(f"{error}; set TORCHINDUCTOR_CACHE_DIR to a folder that only you can write to") from None
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))


def start_compiler() -> None:
    """Start the processes that compile GPU kernels, with stop signals blocked in them.

    A process killed by a signal would never return its kernel, and a run that has to save and stop would wait for that.
    """
    keep_compiled_code()
    with signals_blocked():
        start_compile_workers()
