"""Mutation testing: change one operator, number or statement at a time, and see whether a fast test fails.

    python -m tests.mutation                              all modules of targets.yaml
    python -m tests.mutation model/loss.py --every 3      every third mutant of one module
    python -m tests.mutation model/layers.py --tests tests/model/test_network.py

PyTorch and the other large packages are imported once. Each mutant is written into a copy of the project and tested in
a fork of this process, which imports the project from the copy.

`--output` adds one JSON object a mutant to a file. Exit code 1 if a mutant survives that `targets.yaml` does not list
as equivalent.
"""

import argparse
import gc
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from tests.mutation.mutants import Mutant, mutants_of

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


def judge(mutant: Mutant, tests: list[str], limit_seconds: float) -> dict[str, Any]:
    """In a process of the pool: return outcome, first failing test and seconds. No process is left after the limit."""
    Path(mutant.module).write_text(mutant.source, encoding="utf-8")
    start = time.monotonic()
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
        shutil.copyfile(ROOT / mutant.module, mutant.module)
    lines = REPORT.read_text(encoding="utf-8", errors="replace").splitlines()
    failed = [line.split()[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    seconds = round(time.monotonic() - start, 2)
    return {"outcome": outcome, "failing_test": failed[0] if failed else None, "seconds": seconds}


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


def verdicts(pool: ProcessPoolExecutor, module: str, target: dict[str, Any], every: int) -> Iterator[dict[str, Any]]:
    """Test a module's mutants, after seeing its tests pass on the module as it is; yield mutants with verdicts."""
    source = (ROOT / module).read_text(encoding="utf-8")
    unchanged = pool.submit(judge, Mutant(module, 0, "", "", source), target["tests"], 900.0).result()
    if unchanged["outcome"] != "survived":
        raise SystemExit(f"{module}: {unchanged['failing_test']} fails on the unchanged module")
    mutants = mutants_of(module, source)[::every]
    judged = partial(judge, tests=target["tests"], limit_seconds=20.0 + 4.0 * unchanged["seconds"])
    excused = {line for lines in target.get("equivalent", {}).values() for line in lines}
    for mutant, verdict in zip(mutants, pool.map(judged, mutants), strict=True):
        if verdict["outcome"] == "survived" and excused & {mutant.before, mutant.after}:
            verdict["outcome"] = "equivalent"
        result = {**mutant._asdict(), **verdict}
        del result["source"]
        yield result


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation")
    parser.add_argument("modules", nargs="*", help="modules of targets.yaml (default: all), or others with --tests")
    parser.add_argument("--tests", nargs="+", help="tests to run in place of those that targets.yaml lists")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="test every Nth mutant of a module only")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="mutants tested at a time")
    parser.add_argument("--output", type=Path, default=Path(os.devnull), help="a file of JSON lines, one a mutant")
    options = parser.parse_args()
    targets: dict[str, dict[str, Any]] = yaml.safe_load(TARGETS.read_text(encoding="utf-8"))
    if options.tests:
        targets |= {module: {**targets.get(module, {}), "tests": options.tests} for module in options.modules}
    if unknown := [module for module in options.modules if module not in targets]:
        parser.error(f"{', '.join(unknown)}: not in tests/mutation/targets.yaml; name its tests with --tests")
    # Without bytecode: whether it is stale is judged by size and time of change, which a mutant may share.
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    sys.dont_write_bytecode = True
    for name in ("pytest", *LARGE):
        importlib.import_module(name)
    gc.freeze()  # so that no collection in a fork walks through what is imported here
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the pool ends too
    num_survivors = 0
    with (
        tempfile.TemporaryDirectory(prefix="mutation-") as folder,
        ProcessPoolExecutor(options.jobs, FORK, enter_copy, (Path(folder),)) as pool,
        options.output.open("a", encoding="utf-8") as output,
    ):
        for module in options.modules or list(targets):
            counts: Counter[str] = Counter()
            for result in verdicts(pool, module, targets[module], options.every):
                counts[result["outcome"]] += 1
                if result["outcome"] == "survived":
                    print(f"{module}:{result['line']}: survived: {result['before']}  ->  {result['after']}", flush=True)
                print(json.dumps(result), file=output, flush=True)
            num_counted = counts.total() - counts["equivalent"]
            num_killed = counts["killed"] + counts["timed out"]
            print(f"{module}: {num_killed} of {num_counted} killed, {counts['equivalent']} equivalent", flush=True)
            num_survivors += counts["survived"]
    return 1 if num_survivors else 0


if __name__ == "__main__":
    sys.exit(main())
