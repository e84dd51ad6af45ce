"""Mutation testing: change one operator, number or statement at a time, and see whether a fast test fails.

    python -m tests.mutation                              all modules of targets.yaml
    python -m tests.mutation model/loss.py --every 3      every third mutant of one module

PyTorch and the other large packages are imported once. Each mutant is written into a copy of the project and tested in
a fork of this process, which imports the project from the copy.

Exit code 1 if a mutant survives that `targets.yaml` does not list as equivalent.
"""

import argparse
import ast
import gc
import importlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NotRequired, TypedDict

import yaml

from tests.mutation.mutants import mutants_of

TARGETS = Path(__file__).resolve().with_name("targets.yaml")
ROOT = TARGETS.parents[2]
LARGE = ("hypothesis", "lightning.pytorch", "sacrebleu", "sacremoses", "sentencepiece", "torch.utils.tensorboard")
OPTIONS = ["-x", "-q", "-rfE", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:anyio"]
OPTIONS += ["-W", "ignore::pytest.PytestAssertRewriteWarning", "-m", "not slow and not gpu"]
REPORT = Path("mutation-report.txt")
FORK = multiprocessing.get_context("fork")


def enter_copy(parent: Path) -> None:
    """In a process of the pool: copy what git lists or would list, and work there."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    folder = parent / str(os.getpid())
    for name in listed.stdout.decode().split("\0"):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = str(folder)


def judge(mutant: str | None, module: str, tests: list[str], limit_seconds: float) -> str:
    """In a process of the pool: test a mutant's code, or the module as it is. No process is left after the limit.

    Returns "killed", "timed out", or "survived"; of the module as it is, "survived" or what pytest printed last.
    """
    if mutant:
        Path(module).write_text(mutant, encoding="utf-8")
    process = FORK.Process(target=run_tests, args=(tests,))
    process.start()
    assert process.pid is not None
    try:
        process.join(limit_seconds)
        outcome = {None: "timed out", 0: "survived"}.get(process.exitcode, "killed")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
        shutil.copyfile(ROOT / module, module)
    return outcome if mutant or outcome == "survived" else REPORT.read_text(encoding="utf-8", errors="replace")[-500:]


def run_tests(tests: list[str]) -> None:
    """In a fork: run pytest, and end at once, whatever threads the tests have left."""
    os.setsid()
    report = os.open(REPORT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor, file in enumerate((os.open(os.devnull, os.O_RDONLY), report, report)):
        os.dup2(file, descriptor)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    code = int(importlib.import_module("pytest").main([*OPTIONS, *tests]))
    sys.stdout.flush()
    os._exit(code)


class Target(TypedDict):
    """A module's entry in targets.yaml."""

    tests: list[str]
    equivalent: NotRequired[dict[str, list[str]]]


def outcomes(pool: ProcessPoolExecutor, module: str, target: Target, every: int) -> Counter[str]:
    """Test a module's mutants, after seeing its tests pass on the module as it is; print and count outcomes."""
    began = time.monotonic()
    unchanged = pool.submit(judge, None, module, target["tests"], 900.0).result()
    if unchanged != "survived":
        raise SystemExit(f"{module}: its tests fail on the unchanged module: {unchanged}")
    limit = 20.0 + 4.0 * (time.monotonic() - began)
    found = islice(mutants_of((ROOT / module).read_text(encoding="utf-8")), 0, None, every)
    mutants = [(mutant, ast.unparse(mutant.tree)) for mutant in found]
    judged = partial(judge, module=module, tests=target["tests"], limit_seconds=limit)
    excused = {line for lines in target.get("equivalent", {}).values() for line in lines}
    counts: Counter[str] = Counter()
    for (mutant, _), outcome in zip(mutants, pool.map(judged, [code for _, code in mutants]), strict=True):
        is_excused = outcome == "survived" and not excused.isdisjoint((mutant.before, mutant.after))
        counts["equivalent" if is_excused else outcome] += 1
        if outcome == "survived" and not is_excused:
            print(f"{module}:{mutant.line}: survived: {mutant.before}  ->  {mutant.after}", flush=True)
    num_killed = counts["killed"] + counts["timed out"]
    print(f"{module}: {num_killed} of {len(mutants) - counts['equivalent']} killed, {counts['equivalent']} equivalent")
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation")
    parser.add_argument("modules", nargs="*", help="modules of targets.yaml (default: all)")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="test every Nth mutant of a module only")
    options = parser.parse_args()
    targets: dict[str, Target] = yaml.safe_load(TARGETS.read_text(encoding="utf-8"))
    if unknown := [module for module in options.modules if module not in targets]:
        parser.error(f"{', '.join(unknown)}: not in tests/mutation/targets.yaml")
    # Without bytecode: whether it is stale is judged by size and time of change, which a mutant may share.
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    sys.dont_write_bytecode = True
    for name in ("pytest", *LARGE):
        importlib.import_module(name)
    gc.freeze()  # so that no collection in a fork walks through what is imported here
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the pool ends too
    num_survivors, num_jobs = 0, len(os.sched_getaffinity(0))
    with (
        tempfile.TemporaryDirectory(prefix="mutation-") as folder,
        ProcessPoolExecutor(num_jobs, FORK, enter_copy, (Path(folder),)) as pool,
    ):
        for module in options.modules or list(targets):
            num_survivors += outcomes(pool, module, targets[module], options.every)["survived"]
    return 1 if num_survivors else 0


if __name__ == "__main__":
    sys.exit(main())
